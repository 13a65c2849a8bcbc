#include "flatshard/core/error.h"
#include "flatshard/ops/float8/cuda_float8.h"

namespace flatshard::nn::cuda {
namespace {

[[noreturn]] void refuse_float8() {
  FLATSHARD_THROW(usage, "this build has no CUDA kernels");
}

}  // namespace

bool quantizes(const at::Tensor&) {
  return false;
}

bool is_aligned(const at::Tensor&) {
  return false;
}

Float8RowsAndColumns quantize_swiglu(
    const at::Tensor&,
    const at::Tensor&,
    const float8::Quantizer&,
    const Float8Wanted&) {
  refuse_float8();
}

Float8RowsAndColumns quantize_swiglu_gradient(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const float8::Quantizer&,
    const Float8Wanted&) {
  refuse_float8();
}

Float8RowsAndColumns quantize_side_by_side(
    const at::Tensor&,
    const at::Tensor&,
    const float8::Quantizer&,
    const Float8Wanted&) {
  refuse_float8();
}

Float8RowsAndColumns quantize_norm(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const float8::Quantizer&,
    const Float8Wanted&) {
  refuse_float8();
}

}  // namespace flatshard::nn::cuda
