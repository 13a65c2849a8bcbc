#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace flatshard {

struct GenerateOptions {
  /// The output_dir of a run, finished or not, a checkpoint, or a Hugging Face
  /// folder.
  std::filesystem::path run;
  std::int64_t step = -1;  ///< of a checkpoint; -1: see open_model
  std::string prompt;
  std::int64_t max_new_tokens = 200;
  double temperature = 0.8;  ///< 0: always the likeliest token
  std::int64_t top_k = 0;    ///< 0: all tokens
  double top_p = 1.0;        ///< 1: all tokens
  std::int64_t seed = 0;
  std::int64_t batch_size = 8;  ///< prompts that run at a time
  std::string device = "auto";
  /// The dtype of weights and of kept keys and values: auto is the run's
  /// precision.compute, and float32 for a Hugging Face folder.
  std::string dtype = "auto";
  /// The dataset whose tokenizer is used; empty: the run's data.train, or the
  /// tokenizer of the Hugging Face folder.
  std::string corpus;
  std::string python;  ///< for a tokenizer.json; see data::find_python
  /// Control tokens that the prompt spells out become these tokens.
  bool parse_special = false;
  /// Prompts are conversations, JSON rows as chat_rows.h makes them. They are
  /// rendered by the tokenizer's chat template, and only the assistant's
  /// answers are returned. An answer ends at the token that ends it in the
  /// template, too.
  bool chat = false;
};

/// Continues `options.prompt` with the weights of a run.
/// @return the prompt and its continuation, as text.
std::string generate_text(const GenerateOptions& options);

/// The same for several prompts in place of `options.prompt`, `batch_size` at a
/// time. The seed is applied to each prompt independently.
/// @param got  receives each prompt with its continuation, in order.
void generate_texts(
    const GenerateOptions& options,
    const std::vector<std::string>& prompts,
    const std::function<void(const std::string& text)>& got);

}  // namespace flatshard
