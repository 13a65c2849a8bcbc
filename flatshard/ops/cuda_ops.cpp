#include "flatshard/ops/cuda_ops.h"

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/kernel_launch.h"
#include "flatshard/ops/kernels/ops_kernels.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>

namespace flatshard::nn::cuda {
namespace {

using kernels::Dtype;

Dtype dtype_of(const at::Tensor& tensor) {
  FLATSHARD_CHECK(
      tensor.scalar_type() == at::kFloat ||
          tensor.scalar_type() == at::kBFloat16,
      internal,
      "expected a float32 or bfloat16 tensor, got {}",
      c10::toString(tensor.scalar_type()));
  return tensor.scalar_type() == at::kFloat ? Dtype::f32 : Dtype::bf16;
}

// Returns the pointer of a contiguous tensor; null for an undefined one.
const void* in(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return nullptr;
  }
  FLATSHARD_CHECK(
      tensor.is_cuda() && tensor.is_contiguous(),
      internal,
      "expected a contiguous CUDA tensor, got {}",
      tensor.toString());
  return tensor.const_data_ptr();
}

void* out(const at::Tensor& tensor) {
  in(tensor);
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

cudaStream_t stream() {
  return at::cuda::getCurrentCUDAStream().stream();
}

void check_norm_dim(std::int64_t dim) {
  FLATSHARD_CHECK(
      dim <= kernels::kMaxNormDim,
      config,
      "dim: the RMSNorm kernel supports at most {}, got {}",
      kernels::kMaxNormDim,
      dim);
}

// A bfloat16 weight with float32 rows has no kernel. The copy is tiny.
at::Tensor fitting_weight(const at::Tensor& weight, const at::Tensor& x) {
  return x.scalar_type() == at::kFloat ? weight.to(at::kFloat) : weight;
}

}  // namespace

bool supports(const at::Tensor& tensor) {
  return tensor.is_cuda() && (tensor.scalar_type() == at::kFloat ||
                              tensor.scalar_type() == at::kBFloat16);
}

bool has_cudnn_attention(at::Device device) {
  return at::detail::getCUDAHooks().hasCuDNN() &&
         gpu_has(device, GpuFeature::cudnn_attention);
}

std::optional<at::Generator> default_generator(at::Device device) {
  if (!device.is_cuda()) {
    return {};
  }
  return at::cuda::detail::getDefaultCUDAGenerator(device.index());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps,
    const RmsNormExtras& extras) {
  const c10::cuda::CUDAGuard guard(x.device());
  check_norm_dim(x.size(1));
  const at::Tensor w = fitting_weight(weight, x);
  at::Tensor y = extras.store_y ? at::empty_like(x) : at::Tensor();
  at::Tensor sum = delta.defined() ? at::empty_like(x) : at::Tensor();
  at::Tensor rstd = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  kernels::rms_norm_forward(
      {.x = in(x),
       .delta = in(delta),
       .weight = in(w),
       .sum = out(sum),
       .y = out(y),
       .rstd = rstd.mutable_data_ptr<float>(),
       .rows = x.size(0),
       .dim = x.size(1),
       .eps = static_cast<float>(eps),
       .dtype = dtype_of(x),
       .weight_dtype = dtype_of(w),
       .amax = static_cast<float*>(out(extras.amax))},
      stream());
  check_kernel_launch();
  return {y, sum, rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    at::Tensor* y,
    const at::Tensor& amax,
    bool wants_weight) {
  // Each block costs a row of partial sums, where there are any.
  constexpr std::int64_t kBlocksWithoutPartialSums = 4;
  const c10::cuda::CUDAGuard guard(x.device());
  check_norm_dim(x.size(1));
  const at::Tensor w = fitting_weight(weight, x);
  const std::int64_t wanted =
      static_cast<std::int64_t>(
          kernels::rms_norm_backward_blocks_per_multiprocessor(
              dtype_of(x),
              x.size(1))) *
      (wants_weight ? 1 : kBlocksWithoutPartialSums) *
      at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const std::int64_t blocks =
      std::max<std::int64_t>(1, std::min(wanted, x.size(0)));
  at::Tensor dx = at::empty_like(x);
  at::Tensor partial;
  if (wants_weight) {
    partial = at::empty({blocks, x.size(1)}, x.options().dtype(at::kFloat));
  }
  kernels::rms_norm_backward(
      {.dy = in(dy),
       .dsum = in(dsum),
       .x = in(x),
       .weight = in(w),
       .rstd = rstd.const_data_ptr<float>(),
       .dx = out(dx),
       .y = y != nullptr ? out(*y) : nullptr,
       .partial = static_cast<float*>(out(partial)),
       .blocks = blocks,
       .rows = x.size(0),
       .dim = x.size(1),
       .dtype = dtype_of(x),
       .weight_dtype = dtype_of(w),
       .amax = static_cast<float*>(out(amax))},
      stream());
  check_kernel_launch();
  return {dx, partial};
}

void rms_norm_weight_gradient(
    const at::Tensor& partial,
    at::Tensor& grad,
    bool accumulate) {
  const c10::cuda::CUDAGuard guard(partial.device());
  kernels::sum_partials(
      partial.const_data_ptr<float>(),
      out(grad),
      partial.size(0),
      partial.size(1),
      accumulate,
      dtype_of(grad),
      stream());
  check_kernel_launch();
}

void rope(
    const at::Tensor& x,
    at::Tensor& result,
    const at::Tensor& cos,
    const at::Tensor& sin,
    bool inverse,
    const at::Tensor& positions) {
  const c10::cuda::CUDAGuard guard(x.device());
  kernels::rope(
      {.x = in(x),
       .out = out(result),
       .cos = static_cast<const float*>(in(cos)),
       .sin = static_cast<const float*>(in(sin)),
       .tokens = x.size(0) * x.size(1),
       .seq_len = x.size(1),
       .heads = x.size(2),
       .head_dim = x.size(3),
       .inverse = inverse,
       .dtype = dtype_of(x),
       .positions = positions.defined()
                        ? positions.const_data_ptr<std::int32_t>()
                        : nullptr},
      stream());
  check_kernel_launch();
}

at::Tensor swiglu_forward(
    const at::Tensor& gate,
    const at::Tensor& up,
    const at::Tensor& amax) {
  const c10::cuda::CUDAGuard guard(gate.device());
  at::Tensor y = at::empty_like(gate);
  kernels::swiglu_forward(
      in(gate),
      in(up),
      out(y),
      gate.numel(),
      dtype_of(gate),
      stream(),
      static_cast<float*>(out(amax)));
  check_kernel_launch();
  return y;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    at::Tensor* product,
    const at::Tensor& amax,
    bool over_dy) {
  const c10::cuda::CUDAGuard guard(gate.device());
  at::Tensor dgate = over_dy ? dy : at::empty_like(gate);
  at::Tensor dup = at::empty_like(up);
  kernels::swiglu_backward(
      in(dy),
      in(gate),
      in(up),
      out(dgate),
      out(dup),
      product != nullptr ? out(*product) : nullptr,
      gate.numel(),
      dtype_of(gate),
      stream(),
      static_cast<float*>(out(amax)));
  check_kernel_launch();
  return {dgate, dup};
}

void cross_entropy(
    at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& scale,
    at::Tensor& loss,
    at::Tensor& lse,
    const CrossEntropyArgs& args) {
  const c10::cuda::CUDAGuard guard(logits.device());
  kernels::cross_entropy(
      {.logits = out(logits),
       .targets = targets.const_data_ptr<std::int64_t>(),
       .scale = scale.const_data_ptr<float>(),
       .loss = static_cast<float*>(out(loss)),
       .lse = static_cast<float*>(out(lse)),
       .rows = logits.size(0),
       .vocab = logits.size(1),
       .ignore_index = args.ignore_index,
       .lse_is_given = args.lse_is_given,
       .write_gradient = args.write_gradient,
       .is_part = args.is_part,
       .dtype = dtype_of(logits)},
      stream());
  check_kernel_launch();
}

void add_token_rows(
    const at::Tensor& table,
    const at::Tensor& ids,
    const at::Tensor& rows) {
  const c10::cuda::CUDAGuard guard(table.device());
  FLATSHARD_CHECK(
      table.scalar_type() == at::kFloat,
      internal,
      "expected a float32 table, got {}",
      c10::toString(table.scalar_type()));
  const auto [sorted, order] =
      ids.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor pieces = at::empty(
      {2 * ceil_div(rows.size(0), kernels::AddTokenRows::kPiece), rows.size(1)},
      table.options());
  kernels::add_token_rows(
      {.rows = in(rows),
       .ids = sorted.const_data_ptr<std::int64_t>(),
       .order = order.const_data_ptr<std::int64_t>(),
       .table = static_cast<float*>(out(table)),
       .pieces = static_cast<float*>(out(pieces)),
       .tokens = rows.size(0),
       .dim = rows.size(1),
       .table_rows = table.size(0),
       .dtype = dtype_of(rows)},
      stream());
  check_kernel_launch();
}

void sample_dropout(
    const at::Tensor& x,
    const at::Tensor& samples,
    at::Tensor& to,
    const SampleDropoutArgs& args) {
  const c10::cuda::CUDAGuard guard(x.device());
  in(samples);
  kernels::sample_dropout(
      {.x = in(x),
       .samples = samples.const_data_ptr<std::int64_t>(),
       .out = out(to),
       .rows = x.size(0),
       .dim = x.size(1),
       .first_row = args.first_row,
       .seq_len = args.seq_len,
       .first_column = args.first_column,
       .key = args.key,
       .threshold = args.threshold,
       .scale = static_cast<float>(args.scale),
       .adds = args.adds,
       .dtype = dtype_of(x)},
      stream());
  check_kernel_launch();
}

}  // namespace flatshard::nn::cuda
