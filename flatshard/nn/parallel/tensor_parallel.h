#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace flatshard::nn {

/// A transfer between ranks that is in flight.
class PendingTensor {
 public:
  virtual ~PendingTensor() = default;
  /// Returns what arrives, for kernels on the current stream. Does not block
  /// the host on GPUs. Once.
  virtual at::Tensor finish() = 0;
};

/// An all-gather in flight with parts that arrive one by one.
class PendingGather : public PendingTensor {
 public:
  /// Returns the part of rank `rank`, for kernels on the current stream. These
  /// do not wait for later parts: the parts of the ranks before this one arrive
  /// in turn. Valid until another transfer starts.
  virtual at::Tensor part(int rank) = 0;
};

/// A reduce-scatter in flight with addends that are sent one by one.
class PendingScatter : public PendingTensor {
 public:
  /// Returns where this rank writes its addend to the part of rank `rank`:
  /// contiguous.
  virtual at::Tensor addend(int rank) = 0;
  /// Sends the addend that kernels on the current stream have written. `finish`
  /// is called after all of them.
  virtual void send(int rank) = 0;
};

/// Moves activations between the ranks that have parts of the same layers
/// (tensor parallelism). All ranks of a group read the same tokens.
///
/// Between the layers each rank has an equal run of the tokens (sequence
/// parallelism): rank r has the rows [r * n / size, (r + 1) * n / size) of the
/// flattened [batch, seq]. Norms and residuals need no other tokens, and a run
/// of rows is contiguous for any batch size, so that no transfer permutes.
///
/// Unsplit layers have a null pointer instead, at the cost of a branch.
/// Source: Korthikanti et al., arXiv:2205.05198.
class TensorParallel {
 public:
  TensorParallel(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~TensorParallel() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Returns the bytes that it uses on the device itself.
  virtual std::int64_t nbytes() const { return 0; }

  // These functions make no graph. The results are for kernels on the current
  // stream.

  /// All-gathers the parts of all ranks, in rank order.
  /// @param part  [n, ...] contiguous
  /// @return      [size * n, ...]
  virtual at::Tensor all_gather(const at::Tensor& part) = 0;
  /// Sums over the ranks and keeps this rank's part of the sum. Equal calls
  /// return bitwise identical results.
  /// @param addend  [size * n, ...] contiguous
  /// @return        [n, ...]
  virtual at::Tensor reduce_scatter(const at::Tensor& addend) = 0;

  // The same in parallel with what compute queues until `finish`. Transfers run
  // in the order of their starts, on all ranks alike.

  virtual std::unique_ptr<PendingTensor> start_all_gather(
      const at::Tensor& part) = 0;
  virtual std::unique_ptr<PendingTensor> start_reduce_scatter(
      const at::Tensor& addend) = 0;

  // The same with parts that are sent one by one, in parallel with the matmuls
  // of other parts. Null: parts are only sent together.

  virtual std::unique_ptr<PendingGather> start_gather_of_parts(
      const at::Tensor& /*part*/) {
    return nullptr;
  }
  /// No other transfer starts before all addends were sent. The first argument
  /// has the sizes of a part: [n, ...].
  virtual std::unique_ptr<PendingScatter> start_scatter_of_parts(
      at::IntArrayRef /*sizes*/,
      const at::TensorOptions& /*options*/) {
    return nullptr;
  }

 private:
  int rank_;
  int size_;
};
using TensorParallelPtr = std::shared_ptr<TensorParallel>;

/// Returns this rank's tokens of all.
/// @param x  [batch, seq, dim] or [tokens, dim]
/// @return   [batch, seq / size, dim] or [tokens / size, dim]; x itself for
///   null `ranks`.
/// @throws Error{usage} when the ranks do not divide seq.
at::Tensor own_tokens(const TensorParallelPtr& ranks, const at::Tensor& x);

/// All-gathers the tokens of all ranks in forward. The backward is a
/// reduce-scatter of the gradients.
///
/// @param x  [batch, seq / size, dim] or [tokens / size, dim]
/// @return   [batch, seq, dim] or [tokens, dim]; x itself for null `ranks`.
at::Tensor gather_sequence(const TensorParallelPtr& ranks, const at::Tensor& x);

/// Sums the ranks' addends and keeps this rank's tokens: a reduce-scatter in
/// forward, an all-gather of the gradients in backward.
///
/// @param partial  [batch, seq, dim] or [tokens, dim]
/// @return         [batch, seq / size, dim] or [tokens / size, dim]; `partial`
///   itself for null `ranks`.
/// @throws Error{usage} when the ranks do not divide seq.
at::Tensor scatter_sum(
    const TensorParallelPtr& ranks,
    const at::Tensor& partial);

/// Returns the sizes of this rank's tokens, for tensors with all ranks' tokens.
/// @param sizes  [batch, seq, ...] or [tokens, dim]
/// @throws Error{usage} when the ranks do not divide seq.
std::vector<std::int64_t> sizes_of_part(
    const TensorParallel& ranks,
    at::IntArrayRef sizes);

/// Sums x over the ranks, in rank order, on all of them. Only for small
/// tensors, since all addends are all-gathered. The gradient is the sum of the
/// ranks' gradients.
at::Tensor sum_over_ranks(const TensorParallelPtr& ranks, const at::Tensor& x);

/// All-gathers the columns of all ranks, without a graph. Ranks may have
/// different numbers of columns.
/// @param x      [..., n]
/// @param whole  columns of all ranks, split as by `part_of`
/// @return       [..., whole]; x itself for null `ranks`.
at::Tensor gather_columns(
    const TensorParallelPtr& ranks,
    const at::Tensor& x,
    std::int64_t whole);

/// A contiguous part of indices.
struct IndexPart {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
};

/// This rank's part of [0, `whole`); all of it for null `ranks`. The parts'
/// sizes differ by at most one.
IndexPart part_of(const TensorParallelPtr& ranks, std::int64_t whole);
/// Returns the same for ranks that divide `whole`.
/// @param what  for the message, e.g. "the width of a linear layer"
/// @throws Error{config} when they do not.
IndexPart equal_part_of(
    const TensorParallelPtr& ranks,
    std::int64_t whole,
    const char* what);

/// A parameter that is the part [`part.begin`, `part.end`) of a larger one
/// along a dimension.
struct ParameterPart {
  std::int64_t dim = 0;
  std::int64_t whole = 0;  ///< size of the larger parameter along `dim`
  IndexPart part;
};
/// Makes an unsharded parameter this part of it, whatever memory it has.
void keep_part(const at::Tensor& parameter, const ParameterPart& part);
/// The key is the parameter's name.
using ParameterParts = std::map<std::string, ParameterPart>;

/// A module with own parameters that are parts of larger ones.
class HasParts {
 public:
  virtual ~HasParts() = default;
  virtual ParameterParts parts() const = 0;
};

/// Collects the parts below `root`, by dotted names. A parameter that is not
/// among them is unsharded on each rank.
ParameterParts parts_below(torch::nn::Module& root);

}  // namespace flatshard::nn
