#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace flatshard::nn {

/// Llama 3.1's stretch of the slow rotations.
struct RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_max_positions = 8192;

  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

struct RopeOptions {
  std::int64_t head_dim = 128;
  double theta = 500000.0;
  std::optional<RopeScaling> scaling;
};

/// Angle per position of each of the head_dim / 2 pairs.
/// Source: RoFormer, arXiv:2104.09864; scaling: Llama 3.1 model card.
std::vector<double> rope_frequencies(const RopeOptions& options);

/// cos and sin by position, kept per device and grown on demand.
class RopeTable {
 public:
  explicit RopeTable(RopeOptions options);

  /// (cos, sin), each float32 [seq_len, head_dim / 2] on `device`. The first
  /// call for a device or a longer sequence copies from the host.
  std::pair<at::Tensor, at::Tensor> get(
      std::int64_t seq_len,
      at::Device device);

 private:
  RopeOptions options_;
  at::Tensor cos_;  ///< of the longest sequence so far
  at::Tensor sin_;
  std::pair<at::Tensor, at::Tensor> last_;  ///< what was returned
};

/// Rotates pairs (i, i + head_dim / 2), the Hugging Face order, in float32.
///
/// @param x         [batch, seq, heads, head_dim]
/// @param cos, sin  [seq, head_dim / 2] of RopeTable
/// @param positions int32 [batch * seq], each below seq; undefined: the places
///   in the rows
/// @return          the same shape and dtype, contiguous
at::Tensor rope(
    const at::Tensor& x,
    const at::Tensor& cos,
    const at::Tensor& sin,
    bool inverse = false,
    const at::Tensor& positions = {});

}  // namespace flatshard::nn
