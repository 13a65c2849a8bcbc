#pragma once

#include "flatshard/core/token_parts.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard::cuda {
struct SampleDropoutArgs;
}

namespace flatshard::nn {

/// Zeroes elements with probability p and scales the rest by 1 / (1 - p).
/// Whether an element is zeroed is a function of the seed, a layer's key, the
/// number of the element's sample and its place there (Philox). So neither
/// ranks nor microbatches matter, and a recomputation draws the forward's
/// numbers again.
class SampleDropout {
 public:
  /// @param samples  int64 [batch] on the device: the number of each row's
  ///   sample. A number below 0 leaves the row as it is, for an evaluation. The
  ///   program overwrites it before a forward and keeps it to the backward's
  ///   end. The address stays, so that CUDA graphs read it.
  /// @param part     of the tokens of a batch that the dropout gets
  /// @throws Error{config} for p outside (0, 1).
  SampleDropout(
      double p,
      std::uint64_t seed,
      at::Tensor samples,
      TokenPart part = {});

  /// @param x    [tokens of the part, n], float32 or bfloat16, the sequences
  ///   one after another.
  /// @param key  of the layer.
  /// @param first_column  of x among the layer's inputs; a multiple of 4.
  at::Tensor apply(
      const at::Tensor& x,
      std::uint64_t key,
      std::int64_t first_column = 0) const;
  /// sum += apply(x, key, first_column).
  void add(
      const at::Tensor& x,
      std::uint64_t key,
      at::Tensor& sum,
      std::int64_t first_column = 0) const;

  const at::Tensor& samples() const { return samples_; }

 private:
  void run(
      const at::Tensor& x,
      std::uint64_t key,
      std::int64_t first_column,
      at::Tensor& out,
      bool adds) const;
  /// The same for adjacent tokens. @param in  contiguous, as `out` is
  void run_rows(
      const at::Tensor& in,
      at::Tensor& out,
      const cuda::SampleDropoutArgs& args) const;

  double p_;
  std::uint64_t seed_;
  at::Tensor samples_;
  TokenPart part_;
};

}  // namespace flatshard::nn
