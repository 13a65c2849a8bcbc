#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flatshard/train/config/diagnostics_keys.h"
#include "flatshard/train/config/execution_keys.h"
#include "flatshard/train/config/key.h"
#include "flatshard/train/config/lora_keys.h"
#include "flatshard/train/config/model_keys.h"
#include "flatshard/train/config/optimizer_keys.h"
#include "flatshard/train/config/parallelism_keys.h"
#include "flatshard/train/config/precision_keys.h"
#include "flatshard/train/config/training_keys.h"

namespace flatshard {

/// A training run as a TOML file describes it: one member per section, with the
/// keys of the section as members. `config_keys()` has the texts. Empty
/// optionals are unset; -1 means "derived", and `resolve_config` fills it in.
struct Config {
  config::Run run;
  config::Model model;
  config::Moe moe;
  config::Lora lora;
  config::Data data;
  config::Training training;
  config::Optimizer optimizer;
  config::LrScheduler lr_scheduler;
  config::Parallelism parallelism;
  config::Precision precision;
  config::Float8 float8;
  config::ActivationCheckpoint activation_checkpoint;
  config::CudaGraph cuda_graph;
  config::Validation validation;
  config::Checkpoint checkpoint;
  config::Weights weights;
  config::Metrics metrics;
  config::Profiling profiling;
  config::Diagnostics diagnostics;
  config::Comm comm;
  config::Debug debug;

  /// Returns whether layers run without FP8 weights, adapters and graphs.
  bool has_plain_layers() const {
    return !cuda_graph.enabled() && !float8.recipe && !lora.enabled();
  }
  /// Returns the tokens of a microbatch that a rank reads.
  std::int64_t tokens_per_microbatch() const {
    return training.local_batch_size * training.seq_len /
           parallelism.context_parallel_degree;
  }
};

/// Returns all keys, by section.
std::span<const ConfigKey> config_keys();

/// Parses TOML text.
///
/// @param origin     the file's name for messages ("run.toml:12:8: ...").
/// @param overrides  "section.key=value" each, applied in order. The value is
///                   TOML; quotes of text values may be omitted. A value
///                   without use is a note, not an error.
/// @param notes      if not null: gets the overrides' other changes, a sentence
///                   each.
/// @throws Error{config}: not TOML, unknown section or key (naming the nearest
/// known one), wrong type, value out of range, keys that contradict each
/// other.
Config parse_config(
    std::string_view text,
    const std::string& origin,
    const std::vector<std::string>& overrides = {},
    std::vector<std::string>* notes = nullptr);

/// Returns the same from a file. @throws Error{io} when it cannot be read.
Config load_config(
    const std::filesystem::path& path,
    const std::vector<std::string>& overrides = {},
    std::vector<std::string>* notes = nullptr);

/// Runs the checks that do not depend on the number of ranks. `parse_config`
/// has already run them. @throws Error{config}.
void validate_config(const Config& config);

/// Returns the regions of a block that cuda_graph.modules names: "block" when
/// it is empty. @throws Error{config} for a name that no model has.
std::set<std::string> graph_regions(const Config& config);

/// Fills in the values that depend on the ranks (shard degree, global batch,
/// context_parallel_a2a_degree) and checks them: replicate * shard == world,
/// and global_batch_size a multiple of local_batch_size * world. @throws
/// Error{config} with both sides.
/// @param ranks_per_host  chooses context_parallel_a2a_degree; 0: unknown, or
///   hosts have different numbers.
Config resolve_config(
    const Config& config,
    std::int64_t world,
    std::int64_t ranks_per_host = 0);

/// Returns the complete config as TOML, defaults included; `parse_config` reads
/// it back to an equal one. Unset keys are comments.
std::string to_toml(const Config& config);

/// Returns the complete config as a TOML template, with a description above
/// each key. Keys with their default are comments, except those that most runs
/// set. `parse_config` reads it back to an equal one.
std::string to_commented_toml(const Config& config);

/// Returns the config that a file for a new run starts from: the shape of
/// `preset`, and what most runs set. @throws Error{config} for another name.
Config starting_config(const std::string& preset);

/// Returns the keys of `config` that differ from `base`, a line a section:
/// "  [training] steps = 700, seq_len = 256". Empty when all are equal.
std::string differing_keys(const Config& config, const Config& base);

/// Returns the full names of the keys whose values are not the default.
std::vector<std::string> changed_keys(const Config& config);

/// Returns every key with its type, default, choices and meaning, for
/// `flatshard train --help-config`.
std::string describe_config();

}  // namespace flatshard
