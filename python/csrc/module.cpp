#include "python/csrc/bind.h"

#include <torch/version.h>

PYBIND11_MODULE(_C, m) {
  using namespace flatshard::python;
  m.doc() = "The C++ core of Flatshard; use the package flatshard instead.";
  // flatshard/__init__.py compares these with the installed torch.
  m.attr("version") = FLATSHARD_VERSION;
  m.attr("torch_version") = FLATSHARD_TORCH_VERSION;
  m.attr("with_cuda") = static_cast<bool>(FLATSHARD_WITH_CUDA);
  bind_errors(m);
  bind_comm(m);
  bind_float8(m);
  bind_unit(m);
  bind_runtime(m);
  bind_backward_pass(m);
  bind_optim(m);
  bind_checkpoint(m);
  bind_weights(m);
  bind_machine(m);
  bind_moe(m);
}
