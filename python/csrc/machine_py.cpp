#include "python/csrc/bind.h"

#include "flatshard/device/capability.h"
#include "flatshard/diagnostics/machine.h"

#include <string>
#include <utility>
#include <vector>

namespace flatshard::python {
namespace {

using Lines = std::vector<std::pair<std::string, std::string>>;

Lines lines_of(const std::vector<Fact>& facts) {
  Lines lines;
  for (const Fact& fact : facts) {
    lines.emplace_back(fact.name, fact.value);
  }
  return lines;
}

}  // namespace

void bind_machine(py::module_& m) {
  m.def(
      "build_facts",
      [] { return lines_of(build_facts()); },
      "Versions, and the GPUs that the CUDA code is built for.");
  m.def(
      "machine_facts",
      [] { return lines_of(machine_facts()); },
      "The host, the driver, and each GPU.");
  m.def(
      "gpu_kinds",
      [] {
        std::vector<std::pair<int, std::string>> kinds;
        for (const GpuKind& kind : gpu_kinds()) {
          kinds.emplace_back(kind.gpus.front(), describe(kind));
        }
        return kinds;
      },
      "(index of one GPU, what it does) for each kind of GPU.");
  m.def(
      "check_gpu",
      &check_gpu,
      py::arg("device"),
      "Raises for a GPU that this build does not run on.");
  m.def(
      "try_peer_copies",
      &try_peer_copies,
      "Returns the error of copies between GPUs, or an empty string.");
}

}  // namespace flatshard::python
