#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace flatshard {

struct ExportOptions {
  std::filesystem::path run;  ///< output_dir of a run, or a step-N folder
  std::int64_t step = -1;     ///< -1: the latest
  std::filesystem::path to;   ///< must not exist, or be an empty folder
  std::string dtype;          ///< torch's name; empty: as stored
  bool fp8 = false;           ///< linear layers by Float8Export
  /// For a run with adapters: full weights with the adapters added, instead of
  /// the adapters in PEFT format.
  bool merge = false;
  std::uint64_t max_file_nbytes = 5'000'000'000;
  int num_threads = 4;
};

/// Writes the weights of a checkpoint as a Hugging Face folder: config.json,
/// model.safetensors (or numbered files with their index), the tokenizer and
/// generation_config.json (see export_tokenizer). For a run with adapters it is
/// an adapter folder in PEFT format, or with `merge` a model. The folder
/// appears once it is complete. One tensor at a time is in memory.
/// @return a summary of the written files, for the user.
/// @throws Error{io}, Error{format}, Error{config}.
std::string export_hf(const ExportOptions& options);

}  // namespace flatshard
