#include "flatshard/core/error.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/muon/muon_cuda.h"

namespace flatshard {
namespace {

[[noreturn]] void throw_no_cuda() {
  FLATSHARD_THROW(
      config,
      "this build has no CUDA; configure with FLATSHARD_CUDA=on");
}

}  // namespace

void flat_update_cuda(Algorithm, const FlatUpdate&) {
  throw_no_cuda();
}

void muon_direction_cuda(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    double,
    bool) {
  throw_no_cuda();
}

void muon_apply_cuda(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    double,
    double) {
  throw_no_cuda();
}

void mirror_lower_cuda(const at::Tensor&) {
  throw_no_cuda();
}

void add_matmul_cuda(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    double) {
  throw_no_cuda();
}

}  // namespace flatshard
