#pragma once

#include <filesystem>
#include <string>

#include "flatshard/train/config/run_config.h"

// Copies that a run keeps of the files that it was made of, so that it can be
// moved, and used from any working folder:
//   sources/config.json   model.hf_config
//   sources/init_from/    config.json, generation_config.json and the tokenizer
//                         of model.init_from
//   sources/corpus/       meta.json and the tokenizer of the first dataset of
//                         data.train, without its tokens
namespace flatshard {

/// Their folder below run.output_dir.
inline constexpr const char* kSources = "sources";

/// The files and folders that a config names; empty: none.
struct RunSources {
  std::string corpus;     ///< see tokenizer_corpus
  std::string init_from;  ///< model.init_from
  std::string hf_config;  ///< model.hf_config
};

/// Writes copies below `output_dir`, in place of existing ones. A file that
/// cannot be read any more stays as it is stored. @throws Error{io}.
void save_run_sources(
    const std::filesystem::path& output_dir,
    const RunSources& sources);

/// Returns a stored run's config with paths to the run's own copies. data.train
/// is then only the dataset that provides the run's tokenizer.
/// @param inside  the run's folder, or one below it, such as a checkpoint.
Config with_own_sources(Config config, const std::filesystem::path& inside);

}  // namespace flatshard
