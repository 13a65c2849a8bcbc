#include "flatshard/float8/float8_matmul.h"

#include <ATen/ATen.h>

#include "flatshard/core/error.h"
#include "flatshard/float8/cuda_matmul.h"

namespace flatshard::float8 {
namespace {

bool fit_together(Recipe a, Recipe b) {
  const bool block_of_other =
      (a == Recipe::blockwise && b == Recipe::blockwise_1x128) ||
      (b == Recipe::blockwise && a == Recipe::blockwise_1x128);
  return block_of_other || (a == b && a != Recipe::blockwise);
}

void check_data(const char* name, const at::Tensor& data) {
  FLATSHARD_CHECK(
      data.defined() && data.dim() == 2 && data.is_contiguous() &&
          (data.scalar_type() == at::kFloat8_e4m3fn ||
           data.scalar_type() == at::kFloat8_e5m2),
      config,
      "{}: expected contiguous data [outer, inner] of float8_e4m3fn or "
      "float8_e5m2, got {}",
      name,
      data.defined() ? data.toString() + c10::str(data.sizes()) : "none");
}

void check(
    const at::Tensor& out,
    const Operand& a,
    const Operand& b,
    const MatmulOptions& options) {
  const at::Tensor& da = a.plane.data;
  const at::Tensor& db = b.plane.data;
  check_data("a", da);
  check_data("b", db);
  FLATSHARD_CHECK(
      fit_together(a.recipe, b.recipe),
      config,
      "recipes {} and {} do not multiply; expected one for both (not "
      "blockwise), or blockwise and blockwise_1x128",
      to_string(a.recipe),
      to_string(b.recipe));
  FLATSHARD_CHECK(
      da.scalar_type() == at::kFloat8_e4m3fn ||
          db.scalar_type() == at::kFloat8_e4m3fn,
      config,
      "formats: expected e4m3 for a or b, got e5m2 for both");
  FLATSHARD_CHECK(
      da.size(1) == db.size(1),
      config,
      "matmul: expected a [m, k] and b [n, k], got {} and {}",
      c10::str(da.sizes()),
      c10::str(db.sizes()));
  const auto fits = [&](const at::Tensor& t) {
    return t.dim() == 2 && t.size(0) == da.size(0) && t.size(1) == db.size(0) &&
           t.stride(1) == 1 && t.device() == da.device() &&
           (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16);
  };
  FLATSHARD_CHECK(
      fits(out),
      config,
      "out: expected [{}, {}] float32 or bfloat16 with contiguous rows on {}, "
      "got {}{}",
      da.size(0),
      db.size(0),
      da.device().str(),
      out.toString(),
      c10::str(out.sizes()));
  FLATSHARD_CHECK(
      !options.addend.defined() ||
          (!options.accumulate && fits(options.addend) &&
           options.addend.scalar_type() == out.scalar_type()),
      config,
      "addend: expected a tensor like out, and accumulate = false");
}

void matmul_cpu(
    at::Tensor& out,
    const Operand& a,
    const Operand& b,
    const MatmulOptions& options) {
  const at::NoGradGuard no_grad;
  at::Tensor product =
      at::mm(dequantize(a.plane, a.recipe), dequantize(b.plane, b.recipe).t());
  if (options.accumulate) {
    product += out;
  }
  if (options.addend.defined()) {
    product += options.addend;
  }
  out.copy_(product);
}

}  // namespace

void matmul(
    at::Tensor& out,
    const Operand& a,
    const Operand& b,
    const MatmulOptions& options) {
  check(out, a, b, options);
  if (out.numel() == 0) {
    return;
  }
  if (a.plane.data.size(1) == 0) {  // a sum of nothing
    if (options.addend.defined()) {
      out.copy_(options.addend);
    } else if (!options.accumulate) {
      out.zero_();
    }
  } else if (out.is_cpu()) {
    matmul_cpu(out, a, b, options);
  } else {
    cuda::matmul(out, a, b, options);
  }
}

GpuFeature feature_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::tensorwise:
      return GpuFeature::float8_tensorwise;
    case Recipe::rowwise:
      return GpuFeature::float8_rowwise;
    case Recipe::blockwise:
    case Recipe::blockwise_1x128:
      return GpuFeature::float8_blockwise;
    case Recipe::mxfp8:
      return GpuFeature::float8_mxfp8;
  }
  FLATSHARD_THROW(internal, "recipe {}", static_cast<int>(recipe));
}

bool multiplies(Recipe recipe, at::Device device) {
  return device.is_cuda() && cuda::multiplies(recipe, device);
}

std::string why_not_multiplied(Recipe recipe, at::Device device) {
  const GpuFeature feature = feature_of(recipe);
  return fmt::format(
      "this GPU (sm_{}) does not multiply {} in FP8, {} does{}",
      compute_capability(device),
      to_string(recipe),
      gpus_with(feature),
      row_of(feature).asked_from < row_of(feature).below
          ? " if cuBLASLt supports them"
          : "");
}

}  // namespace flatshard::float8
