#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "flatshard/models/kv_cache.h"
#include "flatshard/models/llama.h"

namespace flatshard::models {

/// Runs a model over sequences that grow token by token. Keys and values of
/// earlier tokens are kept, so a token costs a forward of one token.
///
/// The weights are unsharded and on one device; no backward follows. The KV
/// cache is allocated at once: 2 * rows * slots * kv_heads * head_dim elements
/// of the weights' dtype in each block. There slots is max_tokens, and in
/// blocks with a window at most that window.
class Decoder {
 public:
  struct Options {
    std::int64_t rows = 1;  ///< sequences
    /// The tokens of one sequence, at most the model's max_seq_len. When it is
    /// reached, the older half of them is dropped and the others run again.
    std::int64_t max_tokens = 0;
  };
  /// @throws Error{usage} for bad options.
  Decoder(Llama model, const Options& options);

  /// Starts the sequence of a row, in place of an earlier one.
  /// @param tokens  at least one; the last max_tokens are used.
  /// @return  [vocab], the logits of the token that follows.
  at::Tensor begin(std::int64_t row, std::span<const std::int64_t> tokens);

  /// Ends the sequence of a row.
  void end(std::int64_t row);

  /// Adds a token to each sequence.
  /// @param tokens  one of each row; tokens of rows without a sequence are not
  ///   read.
  /// @return  [rows, vocab], the logits of the tokens that follow.
  ///
  /// Frequencies of a dynamic or longrope rotation change with the length of a
  /// sequence. Where that happens all its tokens run again.
  at::Tensor append(std::span<const std::int64_t> tokens);

  std::int64_t max_tokens() const { return max_tokens_; }
  std::int64_t cache_nbytes() const;

 private:
  /// Runs all tokens of a row. @return [vocab]
  at::Tensor refill(std::int64_t row);
  /// Runs the last token of rows that follow one another. @return [rows, vocab]
  at::Tensor step(std::int64_t first_row, std::int64_t end_row);
  at::Tensor run(const at::Tensor& tokens, const CacheStep& step);
  std::vector<double> frequencies(std::int64_t length) const;

  Llama model_;
  at::Device device_;
  std::int64_t max_tokens_;
  std::vector<std::vector<std::int64_t>> tokens_;  ///< one per row
  std::vector<std::vector<double>> frequencies_;   ///< one per row
  std::vector<KvCache> caches_;                    ///< one per block
};

}  // namespace flatshard::models
