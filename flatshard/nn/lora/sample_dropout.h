#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard::nn {

/// Zeroes elements with probability p and scales the rest by 1 / (1 - p).
/// Whether an element is zeroed is a function of the seed, a layer's key, the
/// number of the sample that the element belongs to and its place there
/// (Philox). So neither ranks nor microbatches matter, and a recomputation
/// draws what the forward drew.
class SampleDropout {
 public:
  /// @param samples  int64 [batch] on the device: the number of each row's
  ///   sample. A number below 0 leaves the row as it is, for an evaluation. The
  ///   program overwrites it before a forward and keeps it to the backward's
  ///   end. The address stays, so that CUDA graphs read it.
  /// @throws Error{config} for p outside of (0, 1).
  SampleDropout(double p, std::uint64_t seed, at::Tensor samples);

  /// @param x    [batch * seq, n], float32 or bfloat16, the sequences one after
  ///   another.
  /// @param key  of the layer.
  at::Tensor apply(const at::Tensor& x, std::uint64_t key) const;
  /// sum += apply(x, key).
  void add(const at::Tensor& x, std::uint64_t key, at::Tensor& sum) const;

  const at::Tensor& samples() const { return samples_; }

 private:
  void run(const at::Tensor& x, std::uint64_t key, at::Tensor& out, bool adds)
      const;

  double p_;
  std::uint64_t seed_;
  at::Tensor samples_;
};

}  // namespace flatshard::nn
