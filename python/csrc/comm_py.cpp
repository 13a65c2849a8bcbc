#include "flatshard/layout/strategy.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/mesh/on_all_ranks.h"
#include "flatshard/peer/peer_memory.h"
#include "python/csrc/bind.h"

#include <torch/csrc/Device.h>

namespace flatshard::python {

void bind_comm(py::module_& m) {
  py::class_<MeshOptions>(m, "MeshOptions")
      .def(
          py::init([](std::string name, double timeout_s) {
            const auto timeout = std::chrono::milliseconds(
                static_cast<std::int64_t>(timeout_s * 1e3));
            return MeshOptions{
                .communicator = {.timeout = timeout},
                .name = std::move(name),
                .connect_timeout = timeout};
          }),
          py::kw_only(),
          py::arg("name"),
          py::arg("timeout_s"));
  py::class_<Mesh, std::shared_ptr<Mesh>>(
      m,
      "Mesh",
      "Named axes over ranks, with communicators of Flatshard's own.")
      .def_static(
          "create",
          [](const std::vector<std::pair<std::string, std::int64_t>>& axes,
             int rank,
             const StoreHandle& store,
             const at::Device& device,
             const MeshOptions& options) {
            std::vector<MeshAxis> list;
            for (const auto& [axis, size] : axes) {
              list.push_back({axis, size});
            }
            return Mesh::create(std::move(list), rank, store, device, options);
          },
          py::arg("axes"),
          py::arg("rank"),
          py::arg("store"),
          py::arg("device"),
          py::arg("options"),
          py::call_guard<py::gil_scoped_release>(),
          "Collective over the ranks of the mesh, and no others.")
      .def_static(
          "single",
          [](const at::Device& device) { return Mesh::single(device); },
          py::arg("device"))
      .def_property_readonly("rank", &Mesh::rank)
      .def_property_readonly("size", &Mesh::size)
      .def_property_readonly(
          "axes",
          [](const Mesh& mesh) {
            std::vector<std::pair<std::string, std::int64_t>> axes;
            for (const MeshAxis& axis : mesh.axes()) {
              axes.emplace_back(axis.name, axis.size);
            }
            return axes;
          },
          "Name and size of each, outermost first.")
      .def_property_readonly("coordinates", &Mesh::coordinates)
      .def("sub_mesh", &Mesh::sub_mesh, py::arg("names"))
      .def(
          "is_part_of",
          &Mesh::is_part_of,
          py::arg("other"),
          "The axes of this one are axes of `other`, of the same mesh.")
      .def_property_readonly(
          "has_fast_links",
          [](Mesh& mesh) {
            const py::gil_scoped_release no_gil;
            return PeerMemory::has_fast_links(mesh.world());
          },
          "Whether NVLink joins all GPUs of the mesh. Collective.")
      .def(
          "on_all_ranks",
          [](Mesh& mesh,
             const std::string& name,
             const py::typing::Callable<std::int64_t()>& work) {
            const py::gil_scoped_release no_gil;
            return on_all_ranks(mesh, name, [&] {
              const py::gil_scoped_acquire gil;
              return work().cast<std::int64_t>();
            });
          },
          py::arg("name"),
          py::arg("work"),
          "Runs `work` on every rank. Raises on all ranks if it raises on one, "
          "else returns rank 0's result. Collective.")
      .def("__repr__", &Mesh::to_string);
  m.def(
      "strategies",
      [] {
        py::list rows;
        for (const StrategyName& row : strategy_names()) {
          rows.append(py::make_tuple(
              row.name,
              row.other_name,
              row.with_replicas,
              row.parameter,
              row.gradient,
              row.optimizer));
        }
        return rows;
      },
      "The table of named strategies: name, other name, name with replicas "
      "along an outer axis, and where parameters, gradients and states are "
      "stored, a letter each for outer and inner axes.");
}

}  // namespace flatshard::python
