#include "flatshard/core/error.h"
#include "flatshard/float8/cuda_float8_ops.h"

namespace flatshard::float8::cuda {
namespace {

[[noreturn]] void refuse() {
  FLATSHARD_THROW(
      config,
      "this build has no CUDA; configure with FLATSHARD_CUDA=on");
}

}  // namespace

void quantize(
    const at::Tensor&,
    const Quantizer&,
    const PlaneView*,
    const PlaneView*) {
  refuse();
}

bool requantizes(const Plane&, const Quantizer&) {
  return false;
}
void requantize(const Plane&, const Quantizer&, const PlaneView&) {
  refuse();
}

void dequantize(
    const at::Tensor&,
    Format,
    const ScaleGrid&,
    const at::Tensor&,
    at::Tensor&) {
  refuse();
}

at::Tensor amax_of(const at::Tensor&) {
  refuse();
}
void transpose_bytes(const at::Tensor&, at::Tensor&) {
  refuse();
}
void swizzle_mx_scales(const at::Tensor&, at::Tensor&) {
  refuse();
}

}  // namespace flatshard::float8::cuda
