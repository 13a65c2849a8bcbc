#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/nn/documents.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace flatshard::nn {

/// How rotations are slowed down for longer sequences than in pretraining.
enum class RopeType {
  llama3,    ///< only slow rotations, Llama 3.1
  linear,    ///< all rotations, by `factor`
  dynamic,   ///< a larger theta once a sequence is longer than the original
  yarn,      ///< only slow rotations; arXiv:2309.00071
  longrope,  ///< a separate factor for each rotation; arXiv:2402.13753
};

struct RopeScaling {
  RopeType type = RopeType::llama3;
  double factor = 8.0;
  double low_freq_factor = 1.0;   ///< of llama3
  double high_freq_factor = 4.0;  ///< of llama3
  /// The length of the pretraining; nothing to linear.
  std::int64_t original_max_positions = 8192;
  /// Turns within the original positions: from beta_fast on yarn keeps a
  /// rotation, up to beta_slow it slows it down by `factor`.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;  ///< yarn rounds these bounds to full turns
  /// cos and sin are multiplied by it: yarn and longrope.
  double attention_factor = 1.0;
  /// The factors of longrope, head_dim / 2 each: for sequences up to the
  /// original length, and for longer ones.
  std::vector<double> short_factors;
  std::vector<double> long_factors;

  bool operator==(const RopeScaling&) const = default;
};

struct RopeOptions {
  std::int64_t head_dim = 128;
  double theta = 500000.0;
  std::optional<RopeScaling> scaling;
};

/// yarn's attention factor by its paper: 0.1 ln(factor) + 1.
double yarn_attention_factor(double factor);

/// Angle per position of each of the head_dim / 2 pairs.
/// @param seq_len  sequence length, used by dynamic and longrope scaling.
/// Source: RoFormer, arXiv:2104.09864; scaling: Llama 3.1 model card.
std::vector<double> rope_frequencies(
    const RopeOptions& options,
    std::int64_t seq_len = 0);

/// cos and sin by position, kept per device and grown on demand.
class RopeTable {
 public:
  explicit RopeTable(RopeOptions options);

  /// (cos, sin), each float32 [seq_len, head_dim / 2] on `device`. The first
  /// call for a device or a longer sequence copies from the host, as does one
  /// for a length that has other frequencies.
  std::pair<at::Tensor, at::Tensor> get(
      std::int64_t seq_len,
      at::Device device);

  /// Returns whether documents of up to `seq_len` tokens have different
  /// frequencies, each by its length.
  bool depends_on_length(std::int64_t seq_len) const {
    return frequencies_of(seq_len) != 0;
  }
  /// Returns (cos, sin) of each token of documents, float32 [tokens, head_dim /
  /// 2], as `get` has them for a sequence of the document's length. Reads no
  /// host memory once `constants` was called for the device.
  std::pair<at::Tensor, at::Tensor> of_documents(const Documents& documents);
  /// Returns the tensors that `get` and `of_documents` read for sequences of
  /// `seq_len` tokens.
  TensorList constants(std::int64_t seq_len, at::Device device);

 private:
  /// Equal for lengths that have the same frequencies.
  std::int64_t frequencies_of(std::int64_t seq_len) const;
  /// Returns factors_ on `device`.
  const at::Tensor& factors(at::Device device);

  RopeOptions options_;
  std::int64_t frequencies_ = 0;  ///< the frequencies of cos_ and sin_
  at::Tensor cos_;                ///< of the longest sequence so far
  at::Tensor sin_;
  at::Tensor factors_;  ///< of longrope, float64 [2, head_dim / 2]: short, long
  std::pair<at::Tensor, at::Tensor> last_;  ///< what was returned
};

/// Rotates pairs (i, i + dim / 2), the Hugging Face order, in float32.
///
/// @param x         [batch, seq, heads, head_dim]
/// @param cos, sin  [seq, dim / 2] of RopeTable; elements of a head from dim on
///                  stay as they are
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
