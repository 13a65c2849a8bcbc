#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/manifest.h"
#include "python/csrc/bind.h"
#include "python/csrc/py_optimizer.h"
#include "python/csrc/tensor_states.h"

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace flatshard::python {
namespace {

using Units = std::vector<std::shared_ptr<PyUnit>>;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Texts = std::map<std::string, std::string>;

/// Python's optimizers, or none.
using AnyOptimizer = std::optional<std::variant<
    std::shared_ptr<PyOptimizer>,
    std::shared_ptr<SeveralOptimizers>,
    std::shared_ptr<TensorStates>>>;

Optimizer* core_of(const AnyOptimizer& optimizer) {
  if (!optimizer) {
    return nullptr;
  }
  if (const auto* own =
          std::get_if<std::shared_ptr<PyOptimizer>>(&*optimizer)) {
    return &(*own)->optimizer();
  }
  if (const auto* several =
          std::get_if<std::shared_ptr<SeveralOptimizers>>(&*optimizer)) {
    return several->get();
  }
  return std::get<std::shared_ptr<TensorStates>>(*optimizer).get();
}

/// The tensors that checkpoints have of a training run.
struct TrainingState {
  Units units;
  AnyOptimizer optimizer;
  std::vector<WholeTensor> whole_tensors;
};

TrainingState
make_state(Units units, AnyOptimizer optimizer, const NamedTensors& buffers) {
  std::vector<WholeTensor> whole;
  for (const auto& [name, tensor] : buffers) {
    whole.push_back({name, tensor});
  }
  return {
      .units = std::move(units),
      .optimizer = std::move(optimizer),
      .whole_tensors = std::move(whole)};
}

/// A Checkpointer and what it reads.
class PyCheckpointer {
 public:
  PyCheckpointer(
      const std::shared_ptr<Mesh>& mesh,
      TrainingState state,
      const std::string& folder,
      std::int64_t keep_latest)
      : state_(std::move(state)) {
    const py::gil_scoped_release no_gil;
    checkpointer_ = Released(std::make_shared<Checkpointer>(
        mesh,
        groups_of(state_.units),
        core_of(state_.optimizer),
        CheckpointOptions{
            .folder = folder,
            .keep_latest = keep_latest,
            .whole_tensors = state_.whole_tensors}));
  }

  void save(std::int64_t step, Texts state) {
    checkpointer_->save(step, std::move(state));
  }
  void wait_for_copies() { checkpointer_->wait_for_copies(); }
  void wait() { checkpointer_->wait(); }
  std::vector<SaveResult> take_results() {
    return checkpointer_->take_results();
  }

 private:
  TrainingState state_;
  Released<Checkpointer> checkpointer_;  // ends before what it reads
};

py::dict describe(const std::filesystem::path& folder) {
  const Manifest manifest = read_manifest(folder);
  py::dict roles;
  for (const auto& [role, tensors] : manifest.tensors) {
    py::dict dtypes;
    for (const auto& [name, tensor] : tensors) {
      dtypes[py::str(name)] = tensor.dtype;
    }
    roles[py::str(role)] = dtypes;
  }
  py::dict result;
  result["step"] = manifest.step;
  result["state"] = manifest.state;
  result["updates"] = manifest.updates;
  result["dtypes"] = roles;
  return result;
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<TensorStates, std::shared_ptr<TensorStates>>(
      m,
      "TensorStates",
      "The state of an optimizer that the core does not have.")
      .def(
          py::init<
              Units,
              const std::vector<std::vector<TensorStates::States>>&>(),
          py::arg("units"),
          py::arg("states"))
      .def("set_updates", &TensorStates::set_updates, py::arg("updates"));

  py::class_<TrainingState>(
      m,
      "TrainingState",
      "The tensors that checkpoints have of a training run.")
      .def(
          py::init(&make_state),
          py::kw_only(),
          py::arg("units"),
          py::arg("optimizer"),
          py::arg("buffers"));

  py::class_<SaveResult>(m, "SaveResult", "The result of one save.")
      .def_readonly("step", &SaveResult::step)
      .def_readonly("seconds", &SaveResult::seconds)
      .def_property_readonly("error", [](const SaveResult& self) {
        return self.error ? std::optional<std::string>(self.error->what())
                          : std::nullopt;
      });

  py::class_<PyCheckpointer>(m, "Checkpointer", "Writes checkpoints.")
      .def(
          py::init<
              const std::shared_ptr<Mesh>&,
              TrainingState,
              const std::string&,
              std::int64_t>(),
          py::arg("mesh"),
          py::arg("state"),
          py::arg("folder"),
          py::arg("keep_latest"))
      .def(
          "save",
          &PyCheckpointer::save,
          py::arg("step"),
          py::arg("state"),
          NoGil())
      .def("wait_for_copies", &PyCheckpointer::wait_for_copies, NoGil())
      .def("wait", &PyCheckpointer::wait, NoGil())
      .def("take_results", &PyCheckpointer::take_results);

  m.def(
      "latest_checkpoint",
      [](const std::string& folder) { return latest_checkpoint(folder); },
      py::arg("folder"),
      "Returns the step of the latest complete checkpoint, or None.");
  m.def(
      "describe_checkpoint",
      [](const std::string& folder) { return describe(folder); },
      py::arg("folder"),
      "Step, state, updates, and dtypes by role and name.");
  m.def(
      "load_checkpoint",
      [](const std::string& folder,
         const std::shared_ptr<Mesh>& mesh,
         const TrainingState& state,
         const std::vector<std::string>& exclude) {
        load_checkpoint(
            folder,
            groups_of(state.units),
            core_of(state.optimizer),
            {.mesh = mesh,
             .exclude = exclude,
             .whole_tensors = state.whole_tensors});
      },
      py::arg("folder"),
      py::arg("mesh"),
      py::arg("state"),
      py::arg("exclude"),
      NoGil(),
      "Collective. All or nothing.");
}

}  // namespace flatshard::python
