#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "flatshard/models/llama.h"
#include "flatshard/models/sample.h"

namespace flatshard::models {

struct GenerationOptions {
  std::int64_t max_new_tokens = 128;
  SampleOptions sample;
  /// Random seed. Each prompt draws from a separate sequence of numbers, so its
  /// text does not depend on the prompts that run with it.
  std::uint64_t seed = 0;
  std::int64_t batch_size = 8;            ///< prompts that run at a time
  std::vector<std::int64_t> stop_tokens;  ///< each ends it, and is returned
  /// The limit of prompt and new tokens, see Decoder; 0: the model's
  /// max_seq_len.
  std::int64_t max_context = 0;

  /// @throws Error{config} naming the option.
  void check() const;
};

/// Receives the new tokens of a prompt, by its index.
using Generated = std::function<
    void(std::size_t prompt, const std::vector<std::int64_t>& tokens)>;

/// Continues prompts of any lengths. A row of the batch that has ended starts
/// the next prompt. Waits for the device at every token.
///
/// @param prompts    of at least one token each.
/// @param generated  is called in the order in which prompts end.
/// @throws Error{usage} for an empty prompt, Error{config} for bad options.
void generate(
    const Llama& model,
    const std::vector<std::vector<std::int64_t>>& prompts,
    const GenerationOptions& options,
    const Generated& generated);

}  // namespace flatshard::models
