#pragma once

#include "flatshard/core/token_parts.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/visit.h"

#include <torch/custom_class.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace flatshard::nn {

/// The places among the inputs of an AttentionKernel.
enum AttentionInput { kQ, kK, kV, kSinks };

/// A fused kernel of causal attention with its arguments, for the autograd node
/// of `run_attention`. Inputs are q [batch, seq, heads, head_dim], then k and v
/// with as many heads or fewer, then sinks where the kernel has them.
class AttentionKernel : public torch::CustomClassHolder {
 public:
  /// A literal.
  virtual const char* name() const = 0;
  /// Returns out as q, the logsumexp, and what else the backward reads. The
  /// backward needs all of them, and nothing else of the forward.
  virtual TensorList forward(const TensorList& inputs) const = 0;
  /// Returns one gradient per input.
  virtual TensorList backward(
      const at::Tensor& grad,
      const TensorList& inputs,
      const TensorList& results) const = 0;
};

using AttentionKernelPtr = c10::intrusive_ptr<AttentionKernel>;

/// Runs a kernel as one autograd node that saves its inputs and its results. In
/// the second run of a part that keeps attention (KeptTensors) the node reuses
/// the results of the first run, and launches nothing.
/// @return  as q
at::Tensor run_attention(AttentionKernelPtr kernel, const TensorList& inputs);

/// Returns whether somebody will read the logsumexp of these inputs' attention.
bool needs_logsumexp(const TensorList& inputs);

/// cuDNN. head_dim up to 128; k and v may have fewer heads.
AttentionKernelPtr cudnn_kernel(
    std::optional<double> scale,
    bool with_logsumexp);

struct FlashOptions {
  std::optional<double> scale;
  std::int64_t window = 0;  ///< see AttentionArgs
  /// Set: the inputs have no dimension `batch`. Unset: each row is one.
  std::optional<FlashSequences> sequences;
  /// The keys of `sequences`: the tokens of q are the last ones of each. Unset:
  /// they are all.
  std::optional<FlashSequences> keys;
};
/// FlashAttention, also with sinks; k and v may have fewer heads.
AttentionKernelPtr flash_kernel(FlashOptions options);

/// Adjacent tokens that attend to themselves and to the tokens before them.
struct QueryChunk {
  TokenRange tokens;
  /// int32 [n + 1]: Documents::offsets of all tokens, also of rows that are
  /// documents.
  at::Tensor offsets;
  std::int64_t max_length = 0;  ///< of a document, or more
};
/// Attention of the chunk's tokens within their documents. Inputs are q
/// [tokens, heads, head_dim], k and v of all tokens up to the chunk's end, and
/// sinks or none. FlashAttention where it accepts q. Else plain operations that
/// store no probabilities.
/// @throws Error{config} naming `plain` on GPUs where no kernel fits.
AttentionKernelPtr
chunk_kernel(const at::Tensor& q, const AttentionArgs& args, QueryChunk chunk);

/// The kernel that at::scaled_dot_product_attention chooses for these inputs.
/// Null where it has no logsumexp, e.g. a chain of plain operations.
/// @param inputs  k and v have as many heads as q.
AttentionKernelPtr aten_kernel(
    const TensorList& inputs,
    std::optional<double> scale,
    bool with_logsumexp);

}  // namespace flatshard::nn
