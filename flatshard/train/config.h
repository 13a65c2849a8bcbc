#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "flatshard/data/token_source.h"

namespace flatshard {

/// A training run as a TOML file describes it. Each struct is a section, each
/// member a key of that name; `config_keys()` has the texts. Empty optionals
/// are unset; -1 means "derived", and `resolve` fills it in.
struct Config {
  struct Run {
    std::string output_dir = "outputs/run";
    std::int64_t seed = 0;
    bool save_weights = true;
  } run;

  struct Model {
    std::string family = "auto";
    std::string hf_config;
    std::string init_from;
    std::string preset;
    std::optional<std::int64_t> dim;
    std::optional<std::int64_t> layers;
    std::optional<std::int64_t> heads;
    std::optional<std::int64_t> kv_heads;
    std::optional<std::int64_t> head_dim;
    std::optional<std::int64_t> ffn_dim;
    std::optional<std::int64_t> vocab_size;
    std::optional<std::int64_t> max_seq_len;
    std::optional<double> rope_theta;
    std::optional<double> norm_eps;
    std::optional<double> initializer_range;
    std::optional<bool> tie_embeddings;
    std::optional<bool> qk_norm;
    std::optional<std::int64_t> num_experts;
    std::optional<std::int64_t> experts_per_token;
    std::optional<std::int64_t> moe_ffn_dim;
    std::optional<std::int64_t> shared_experts;
    std::optional<std::int64_t> dense_layers;
    std::string router_score = "auto";
    std::optional<bool> router_normalize;
    std::optional<double> router_scale;
    std::optional<std::int64_t> router_groups;
    std::optional<std::int64_t> router_kept_groups;
  } model;

  struct Moe {
    double aux_loss = 0.0;
    double z_loss = 0.0;
    double balance_rate = 0.0;
    double expert_capacity_factor = 0.0;
  } moe;

  struct Data {
    std::vector<data::SourceChoice> train;
    std::vector<data::SourceChoice> validation;
  } data;

  struct Training {
    std::int64_t steps = 1000;
    std::int64_t seq_len = 2048;
    std::int64_t local_batch_size = 1;
    std::int64_t global_batch_size = -1;
    double max_norm = 1.0;
    std::string on_nonfinite = "stop";
  } training;

  struct Optimizer {
    std::string name = "adamw";
    double lr = 3e-4;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0.1;
    double momentum = 0.0;
    bool overlap = false;
  } optimizer;

  struct LrScheduler {
    std::string name = "cosine";
    std::int64_t warmup_steps = 0;
    std::optional<double> decay_ratio;
    double min_lr_factor = 0.0;
  } lr_scheduler;

  struct Parallelism {
    std::string strategy = "zero3";
    std::int64_t data_parallel_replicate_degree = 1;
    std::int64_t data_parallel_shard_degree = -1;
    std::int64_t expert_parallel_degree = 1;
    std::string token_exchange = "auto";
    bool overlap_expert_parallel = false;
    bool delay_wgrad = false;
    std::int64_t prefetch = 1;
    bool reshard_after_forward = true;
    double memory_budget = 0.0;
    bool keep_compute_weights = true;
    std::string copy_engines = "auto";
    std::string granularity = "element";
    double max_padding = 0.05;
  } parallelism;

  struct Precision {
    std::string compute = "bfloat16";
    std::string reduce = "float32";
    std::string main_params = "float32";
    std::string main_grads = "float32";
    std::string scaling = "mean";
  } precision;

  struct Float8 {
    std::string recipe = "none";
    std::string exclude;
    bool keep_first_last = false;
    std::string column_plane = "auto";
    std::string gather_parts = "recomputed";
    bool emulate = false;
  } float8;

  struct ActivationCheckpoint {
    std::string mode = "none";
  } activation_checkpoint;

  struct CudaGraph {
    std::string impl = "none";
    std::string modules;
    std::int64_t warmup_steps = 3;
    std::string on_miss = "eager";
  } cuda_graph;

  struct Validation {
    std::int64_t freq = 0;
    std::int64_t sequences = 256;
  } validation;

  struct Checkpoint {
    std::int64_t interval = 0;
    std::int64_t keep_latest_k = 0;
    bool async = true;
    std::string folder = "checkpoints";
    std::int64_t load_step = -1;
    std::string exclude;
    bool export_hf_at_end = false;
  } checkpoint;

  struct Metrics {
    std::int64_t log_freq = 10;
  } metrics;

  struct Profiling {
    bool enabled = false;
    std::int64_t step = 5;
    std::string folder = "profile";
  } profiling;

  struct Diagnostics {
    std::int64_t norms_freq = 0;
    bool nan_check = false;
    bool overlap_check = false;
    bool poison = false;
    bool strict = false;
  } diagnostics;

  struct Comm {
    double timeout_s = 300;
    bool watcher = true;
  } comm;

  struct Debug {
    std::int64_t comm_delay_us = 0;
    std::int64_t comm_delay_seed = 0;
    bool deterministic = false;
    std::int64_t spoil_gradient_step = 0;
    bool emulate_graphs = false;
    bool force_balance = false;
  } debug;
};

/// A member of a Config.
using ConfigField = std::variant<
    std::string*,
    std::vector<data::SourceChoice>*,
    std::int64_t*,
    double*,
    bool*,
    std::optional<std::int64_t>*,
    std::optional<double>*,
    std::optional<bool>*>;

/// One key: parsing, printing, the help text and "did you mean" come from
/// this. The default is the member's value in `Config{}`.
struct ConfigKey {
  std::string_view section;
  std::string_view name;
  ConfigField (*field)(Config&);
  std::string_view help;
  std::string_view choices = {};  ///< "a|b|c", empty: any value
  double min = -1e300;            ///< for numbers
  double max = 1e300;

  std::string full_name() const;
};

std::span<const ConfigKey> config_keys();

/// Parses TOML text.
///
/// @param origin     the file's name for messages ("run.toml:12:8: ...").
/// @param overrides  "section.key=value" each, applied in order. The value is
///                   TOML; for keys that hold text the quotes may be left out.
///                   What it leaves without use is a note and no error.
/// @param notes      if not null: gets what the overrides changed besides, a
///                   sentence each.
/// @throws Error{config}: not TOML, unknown section or key (naming the nearest
/// known one), wrong type, value out of range, keys that contradict each
/// other.
Config parse_config(
    std::string_view text,
    const std::string& origin,
    const std::vector<std::string>& overrides = {},
    std::vector<std::string>* notes = nullptr);

/// The same from a file. @throws Error{io} when it cannot be read.
Config load_config(
    const std::filesystem::path& path,
    const std::vector<std::string>& overrides = {},
    std::vector<std::string>* notes = nullptr);

/// Checks what does not depend on the number of ranks. `parse_config` has done
/// this already. @throws Error{config}.
void validate_config(const Config& config);

/// The regions of a block that cuda_graph.modules names: "block" when it is
/// empty. @throws Error{config} for a name that no model has.
std::set<std::string> graph_regions(const Config& config);

/// Fills in what depends on the number of ranks (shard degree, global batch)
/// and checks it: replicate * shard == world, and global_batch_size a multiple
/// of local_batch_size * world. @throws Error{config} with both sides.
Config resolve_config(const Config& config, std::int64_t world);

/// The whole config as TOML, defaults included; `parse_config` reads it back
/// to an equal one. Unset keys are comments.
std::string to_toml(const Config& config);

/// The keys of `config` that differ from `base`, a line a section:
/// "  [training] steps = 700, seq_len = 256". Empty when all are equal.
std::string differing_keys(const Config& config, const Config& base);

/// Writes to_toml to <output_dir>/config.toml, making the folder.
std::filesystem::path save_config(const Config& config);

/// Every key with its type, default, choices and meaning, for
/// `flatshard train --help-config`.
std::string describe_config();

}  // namespace flatshard
