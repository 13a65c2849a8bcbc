#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace flatshard {

struct GenerateOptions {
  std::filesystem::path run;  ///< the output_dir of a finished run
  std::string prompt;
  std::int64_t max_new_tokens = 200;
  double temperature = 0.8;  ///< 0: always the likeliest token
  std::int64_t top_k = 0;    ///< 0: all tokens
  std::int64_t seed = 0;
  std::string device = "auto";
  /// The corpus whose tokenizer is used; empty: the run's data.train.
  std::string corpus;
};

/// Loads config.toml and model.safetensors of a run and continues the prompt.
/// @return the prompt and what follows, as text.
std::string generate_text(const GenerateOptions& options);

}  // namespace flatshard
