#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

/// CUDA kernels for tensors. Built twice: cuda_ops.cpp with CUDA,
/// no_cuda_ops.cpp without (its functions throw Error{usage}). Tensors are
/// contiguous, float32 or bfloat16, on one GPU; work goes to the current
/// stream; nothing blocks the host.
namespace flatshard::nn::cuda {

/// Returns whether the kernels support this tensor (CUDA, float32 or bfloat16).
bool supports(const at::Tensor& tensor);
/// Returns whether attention on this GPU is cuDNN's
/// (GpuFeature::cudnn_attention).
bool has_cudnn_attention(at::Device device);
/// Returns the default generator of a CUDA device; empty for any other device.
std::optional<at::Generator> default_generator(at::Device device);

/// Outputs that the forward of a norm leaves out, or adds.
struct RmsNormExtras {
  bool store_y = true;  ///< false: y is undefined
  /// [] float32 when defined: max(amax, y's largest magnitude).
  at::Tensor amax;
};

/// @param delta  added to x first when defined; `sum` is then x + delta, else
///               undefined.
/// @return (y, sum, rstd float32 [rows])
std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_forward(
    const at::Tensor& x,
    const at::Tensor& delta,
    const at::Tensor& weight,
    double eps,
    const RmsNormExtras& extras = {});

/// Adds `dsum` to dx when it is defined.
/// @param y     when given, overwritten by the forward's y; may be dy.
/// @param amax  [] float32 when defined: max(amax, dx's largest magnitude).
/// @param wants_weight  of a frozen weight: false.
/// @return (dx, float32 partial sums [blocks, dim] of the weight gradient, or
///   undefined without wants_weight)
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& dy,
    const at::Tensor& dsum,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    at::Tensor* y,
    const at::Tensor& amax = {},
    bool wants_weight = true);

/// grad = (accumulate ? grad : 0) + sum of partial over blocks; grad is
/// float32 or bfloat16 [dim].
void rms_norm_weight_gradient(
    const at::Tensor& partial,
    at::Tensor& grad,
    bool accumulate);

/// Rotates x [batch, seq, heads, head_dim] into out (may be x).
/// @param positions  int32 [batch * seq]; undefined: the places in the rows.
void rope(
    const at::Tensor& x,
    at::Tensor& out,
    const at::Tensor& cos,
    const at::Tensor& sin,
    bool inverse,
    const at::Tensor& positions = {});

/// @param amax  [] float32 when defined: max(amax, the largest magnitude).
at::Tensor swiglu_forward(
    const at::Tensor& gate,
    const at::Tensor& up,
    const at::Tensor& amax = {});
/// @param product  when given, overwritten by swiglu_forward(gate, up); may be
///                 dy.
/// @param amax     [2] float32 when defined: max(amax, the largest magnitude)
/// of
///                 dgate and of dup.
/// @param over_dy  dgate is written over dy.
/// @return (dgate, dup)
std::tuple<at::Tensor, at::Tensor> swiglu_backward(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    at::Tensor* product,
    const at::Tensor& amax = {},
    bool over_dy = false);

struct CrossEntropyArgs {
  std::int64_t ignore_index = -100;
  bool lse_is_given = false;  ///< read `lse` instead of computing it
  bool write_gradient = false;
  /// The logits cover a part of the vocabulary: a target outside it belongs to
  /// another part, and `loss` gets the logit at the target, or 0.
  bool is_part = false;
};
/// Cross-entropy of one chunk of logits.
///
/// @param logits   [rows, vocab]; with write_gradient overwritten by
///                 (softmax - onehot) * scale, zeros in ignored rows.
/// @param targets  int64 [rows]
/// @param scale    float32, one element on the device
/// @param loss     float32 [rows], written unless lse_is_given; 0 in ignored
///                 rows; NaN for a target outside the vocabulary, unless
///                 is_part.
/// @param lse      float32 [rows]
void cross_entropy(
    at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& scale,
    at::Tensor& loss,
    at::Tensor& lse,
    const CrossEntropyArgs& args);

/// table[ids[t]] += rows[t] for each token t, in float32 and in the order of
/// tokens: deterministic.
///
/// @param table  float32 [n, dim]
/// @param ids    int64 [tokens], 0 or more; n or more: the row is skipped
/// @param rows   [tokens, dim]
void add_token_rows(
    const at::Tensor& table,
    const at::Tensor& ids,
    const at::Tensor& rows);

struct SampleDropoutArgs {
  std::int64_t first_row = 0;     ///< of x among the rows of all samples
  std::int64_t seq_len = 1;       ///< rows of a sample
  std::uint64_t key = 0;          ///< of Philox
  std::int64_t first_column = 0;  ///< of x among the drawn; multiple of 4
  std::uint64_t threshold = 0;    ///< a word below it drops its element
  double scale = 1.0;             ///< of elements that stay
  bool adds = false;              ///< to `out`
};
/// See SampleDropout.
///
/// @param x        [rows, n]
/// @param samples  int64 [batch]; batch * seq_len >= first_row + rows
/// @param out      like x
void sample_dropout(
    const at::Tensor& x,
    const at::Tensor& samples,
    at::Tensor& out,
    const SampleDropoutArgs& args);

}  // namespace flatshard::nn::cuda
