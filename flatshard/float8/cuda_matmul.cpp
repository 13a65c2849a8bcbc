#include "flatshard/float8/cuda_matmul.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <cublasLt.h>

#include <map>
#include <mutex>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/cuda_scope.h"
#include "flatshard/float8/cublaslt_product.h"

namespace flatshard::float8::cuda {
namespace {

// -1: no scales.
std::int32_t mode_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::tensorwise:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case Recipe::rowwise:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case Recipe::blockwise:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case Recipe::blockwise_1x128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Recipe::mxfp8:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
  }
  return -1;
}

// Matmuls of 1x128 blocks require certain numbers of rows in a: rows of zeros
// are added, and dropped again.
bool run_with_more_rows(const Product& p) {
  const std::int64_t m = p.a.data.size(0);
  const std::int64_t more = round_up(m, kBlock);
  Product whole = p;
  at::Tensor data =
      at::zeros({more, p.a.data.size(1)}, p.a.data.options().dtype(at::kByte));
  data.narrow(0, 0, m).copy_(p.a.data.view(at::kByte));
  at::Tensor scales =
      at::ones({p.a.scales.size(1), more}, p.a.scales.options()).t();
  scales.narrow(0, 0, m).copy_(p.a.scales);
  whole.a.data = data.view(p.a.data.scalar_type());
  whole.a.scales = scales;
  whole.out = at::empty({more, p.out.size(1)}, p.out.options());
  if (p.beta != 0.0F) {
    whole.out.narrow(0, 0, m).copy_(p.c);
    whole.out.narrow(0, m, more - m).zero_();
  }
  whole.c = whole.out;
  if (!run_product(whole)) {
    return false;
  }
  at::Tensor out = p.out;
  out.copy_(whole.out.narrow(0, 0, m));
  return true;
}

void check_shape(const Side& a, const Side& b, Recipe recipe) {
  const bool blocks =
      recipe == Recipe::blockwise || recipe == Recipe::blockwise_1x128;
  const std::int64_t step = blocks ? kBlock : 16;
  FLATSHARD_CHECK(
      a.data.size(1) % step == 0 && b.data.size(0) % 16 == 0,
      config,
      "matmul: expected k divisible by {} and n by 16 for {} on CUDA, got a {} "
      "and b {}; fill k up with zeros (multiple), or leave this layer in "
      "bfloat16",
      step,
      to_string(recipe),
      c10::str(a.data.sizes()),
      c10::str(b.data.sizes()));
}

// The table does not cover newer GPUs, so cuBLASLt is queried once and the
// answer kept.
bool cublaslt_has(Recipe recipe, at::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<Recipe, at::DeviceIndex>, bool> answers;
  const std::lock_guard lock(mutex);
  const auto [answer, is_new] = answers.try_emplace({recipe, device.index()});
  if (is_new) {
    const Recipe other =
        recipe == Recipe::blockwise ? Recipe::blockwise_1x128 : recipe;
    answer->second = has_product(mode_of(other), mode_of(recipe), device);
  }
  return answer->second;
}

Side side_of(const Operand& operand, bool emulated) {
  if (emulated) {
    return {
        dequantize(operand.plane, operand.recipe, {.dtype = at::kBFloat16})};
  }
  const bool mx = operand.recipe == Recipe::mxfp8;
  return {
      operand.plane.data,
      mx ? float8::swizzle_mx_scales(operand.plane.scales)
         : operand.plane.scales,
      mode_of(operand.recipe)};
}

}  // namespace

bool multiplies(Recipe recipe, at::Device device) {
  const int sm = compute_capability(device);
  const GpuFeature feature = feature_of(recipe);
  return gpu_has(sm, feature) &&
         (!gpu_is_asked(sm, feature) || cublaslt_has(recipe, device));
}

void matmul(
    at::Tensor& out,
    const Operand& a,
    const Operand& b,
    const MatmulOptions& options) {
  const detail::CudaDeviceScope scope(out.device());
  const bool emulated = !cuda::multiplies(a.recipe, out.device());
  FLATSHARD_CHECK(
      !emulated || options.emulate,
      config,
      "{}; expected another recipe, or emulate = true",
      why_not_multiplied(a.recipe, out.device()));
  // Decoded operands are bfloat16, and cuBLASLt supports fast accumulation only
  // for FP8.
  const bool may_be_fast = !emulated && (a.recipe == Recipe::tensorwise ||
                                         a.recipe == Recipe::rowwise);
  Product p{
      .a = side_of(a, emulated),
      .b = side_of(b, emulated),
      .out = out,
      .c = options.addend.defined() ? options.addend : out,
      .beta = options.accumulate || options.addend.defined() ? 1.0F : 0.0F,
      .fast = options.fast_accumulation && may_be_fast};
  check_shape(p.a, p.b, b.recipe == Recipe::blockwise ? b.recipe : a.recipe);
  const bool may_add_rows = p.a.mode == mode_of(Recipe::blockwise_1x128) &&
                            p.a.data.size(0) % kBlock != 0;
  FLATSHARD_CHECK(
      run_product(p) || (may_add_rows && run_with_more_rows(p)),
      config,
      "matmul: cuBLASLt has no algorithm for {} {} x {} {}^T on this GPU; "
      "leave this layer in bfloat16 (exclude)",
      to_string(a.recipe),
      c10::str(p.a.data.sizes()),
      to_string(b.recipe),
      c10::str(p.b.data.sizes()));
}

}  // namespace flatshard::float8::cuda
