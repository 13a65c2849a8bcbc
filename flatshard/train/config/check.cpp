#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/config/run_config.h"

namespace flatshard {
namespace config {
namespace {

const std::vector<KeyTable>& key_tables() {
  static const std::vector<KeyTable> tables{
      training_keys(),
      model_keys(),
      lora_keys(),
      optimizer_keys(),
      parallelism_keys(),
      precision_keys(),
      execution_keys(),
      diagnostics_keys()};
  return tables;
}

// Same order as config.toml and the help text.
constexpr std::string_view kSections[] = {
    "run",         "model",      "moe",         "lora",
    "data",        "training",   "optimizer",   "lr_scheduler",
    "parallelism", "precision",  "float8",      "activation_checkpoint",
    "validation",  "checkpoint", "weights",     "metrics",
    "cuda_graph",  "profiling",  "diagnostics", "comm",
    "debug"};

const ConfigKey& key_of(std::string_view full_name) {
  const auto keys = config_keys();
  const auto found = std::ranges::find(keys, full_name, &ConfigKey::full_name);
  FLATSHARD_CHECK(
      found != keys.end(),
      internal,
      "the table of keys names '{}', but no such key exists",
      full_name);
  return *found;
}

/// "section.name = value", as TOML has it, or "section.name unset".
std::string assignment(Config& config, std::string_view full_name) {
  const std::string value = value_text(key_of(full_name).field(config));
  return value.empty() ? fmt::format("{} unset", full_name)
                       : fmt::format("{} = {}", full_name, value);
}

void check_conflicts(Config& config) {
  for (const ConfigKey& key : config_keys()) {
    for (const Conflict& conflict : key.conflicts) {
      if (!conflict.found(config) || !differs_from_default(config, key)) {
        continue;
      }
      std::vector<std::string> with;
      for (const std::string_view name : conflict.with) {
        with.push_back(assignment(config, name));
      }
      FLATSHARD_THROW(
          config,
          "{}{}{}: {}",
          assignment(config, key.full_name),
          with.empty() ? "" : " with ",
          fmt::join(with, " and "),
          conflict.why);
    }
  }
}

/// A key that is set, and the condition without which it has no effect.
struct UnusedKey {
  const ConfigKey* key;
  const UsedIf* used_if;
  std::string value;  ///< of the chooser, in --set syntax
};

std::vector<UnusedKey> find_unused(const Config& config) {
  std::vector<UnusedKey> found;
  Config copy = config;
  for (const ConfigKey& key : config_keys()) {
    for (const UsedIf& used : key.used_if) {
      if (!used.holds(config) && differs_from_default(config, key)) {
        found.push_back(
            {&key, &used, plain_text(key_of(used.chooser).field(copy))});
      }
    }
  }
  return found;
}

/// Returns the maximum number of warm-up steps that fit before the decay.
std::int64_t longest_warmup(const Config& config) {
  const LrSchedule::Kind kind = config.lr_scheduler.name;
  const bool has_decay =
      kind == LrSchedule::Kind::wsd ||
      (kind != LrSchedule::Kind::constant && config.lr_scheduler.decay_ratio);
  const LrSchedule schedule{
      .kind = kind,
      .total_steps = config.training.steps,
      .decay_ratio = config.lr_scheduler.decay_ratio};
  return config.training.steps - (has_decay ? schedule.decay_steps() : 0);
}

}  // namespace

std::vector<std::string> settle_overrides(
    Config& config,
    const std::set<std::string_view>& overridden) {
  std::vector<std::string> notes;
  const auto given = [&](std::string_view name) {
    return overridden.contains(name);
  };
  for (bool again = true; std::exchange(again, false);) {
    for (const UnusedKey& unused : find_unused(config)) {
      const std::string_view name = unused.key->full_name;
      if (!given(unused.used_if->chooser) || given(name)) {
        continue;
      }
      notes.push_back(fmt::format(
          "{} = {} is not used, since --set {}={}",
          name,
          value_text(unused.key->field(config)),
          unused.used_if->chooser,
          unused.value));
      set_to_default(config, *unused.key);
      again = true;
    }
  }
  std::int64_t& warmup = config.lr_scheduler.warmup_steps;
  if (given("training.steps") && !given("lr_scheduler.warmup_steps") &&
      warmup > longest_warmup(config)) {
    const std::int64_t most = std::max<std::int64_t>(0, longest_warmup(config));
    notes.push_back(fmt::format(
        "lr_scheduler.warmup_steps = {} instead of {}, since --set "
        "training.steps={}",
        most,
        std::exchange(warmup, most),
        config.training.steps));
  }
  std::int64_t& traced = config.profiling.step;
  if ((given("training.steps") || given("profiling.enabled")) &&
      !given("profiling.step") && config.profiling.enabled &&
      traced > config.training.steps) {
    notes.push_back(fmt::format(
        "profiling.step = {} instead of {}, since there are no more "
        "training.steps",
        config.training.steps,
        std::exchange(traced, config.training.steps)));
  }
  OnNonfinite& nonfinite = config.training.on_nonfinite;
  if (given("checkpoint.interval") && !given("training.on_nonfinite") &&
      config.checkpoint.interval == 0 && nonfinite == OnNonfinite::rewind) {
    nonfinite = OnNonfinite::stop;
    notes.emplace_back(
        "training.on_nonfinite = \"stop\" instead of \"rewind\", since --set "
        "checkpoint.interval=0 leaves nothing to rewind to");
  }
  return notes;
}

}  // namespace config

std::span<const ConfigKey> config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> sorted;
    for (const std::string_view section : config::kSections) {
      for (const config::KeyTable& table : config::key_tables()) {
        std::ranges::copy_if(
            table.keys,
            std::back_inserter(sorted),
            [&](const ConfigKey& key) { return key.section() == section; });
      }
    }
    return sorted;
  }();
  return keys;
}

void validate_config(const Config& config) {
  Config copy = config;
  for (const ConfigKey& key : config_keys()) {
    config::check_value(key, key.field(copy), "config");
  }
  for (const config::KeyTable& table : config::key_tables()) {
    if (table.check != nullptr) {
      table.check(config);
    }
  }
  config::check_conflicts(copy);
  for (const config::UnusedKey& unused : config::find_unused(config)) {
    FLATSHARD_THROW(
        config,
        "{} is set, but {} = \"{}\" does not use it; it belongs to {}",
        unused.key->full_name,
        unused.used_if->chooser,
        unused.value,
        unused.used_if->belongs_to);
  }
}

Config resolve_config(
    const Config& config,
    std::int64_t world,
    std::int64_t ranks_per_host) {
  validate_config(config);
  FLATSHARD_CHECK(world >= 1, usage, "expected world >= 1, got {}", world);
  Config resolved = config;
  std::int64_t& replicate = resolved.parallelism.data_parallel_replicate_degree;
  std::int64_t& shard = resolved.parallelism.data_parallel_shard_degree;
  const std::int64_t tensor = resolved.parallelism.tensor_parallel_degree;
  const std::int64_t context = resolved.parallelism.context_parallel_degree;
  FLATSHARD_CHECK(
      world % tensor == 0,
      config,
      "parallelism.tensor_parallel_degree = {}: expected a divisor of the {} "
      "ranks",
      tensor,
      world);
  std::string each =
      tensor == 1 ? "" : fmt::format(" / tensor_parallel_degree = {}", tensor);
  FLATSHARD_CHECK(
      world / tensor % context == 0,
      config,
      "parallelism.context_parallel_degree = {}: expected a divisor of the {} "
      "ranks{}",
      context,
      world,
      each);
  if (context > 1) {
    each += fmt::format(" / context_parallel_degree = {}", context);
  }
  config::resolve_head_ranks(resolved.parallelism, world, ranks_per_host);
  const std::int64_t data_ranks = resolved.parallelism.num_data_ranks(world);
  std::int64_t& rest = replicate == -1 ? replicate : shard;
  const std::int64_t given = replicate == -1 ? shard : replicate;
  if (rest == -1) {
    FLATSHARD_CHECK(
        data_ranks % given == 0,
        config,
        "parallelism: {} ranks{} cannot be divided by {} = {}",
        world,
        each,
        &rest == &replicate ? "data_parallel_shard_degree"
                            : "data_parallel_replicate_degree",
        given);
    rest = data_ranks / given;
  }
  FLATSHARD_CHECK(
      replicate * shard == data_ranks,
      config,
      "parallelism: data_parallel_replicate_degree * "
      "data_parallel_shard_degree = {} * {} must be the number of ranks, {}{}",
      replicate,
      shard,
      world,
      each);
  if (resolved.data.packing == data::Packing::documents &&
      resolved.data.documents_per_sample == -1) {
    resolved.data.documents_per_sample =
        data::default_max_documents(resolved.training.seq_len);
  }
  const config::Parallelism& p = resolved.parallelism;
  FLATSHARD_CHECK(
      shard % config::expert_data_ranks(p) == 0,
      config,
      "parallelism.expert_parallel_degree = {}{}{} must divide "
      "data_parallel_shard_degree = {} of {} ranks{}",
      p.expert_parallel_degree,
      p.expert_tensor_parallel_degree == 1
          ? ""
          : fmt::format(
                " * expert_tensor_parallel_degree = {}{}",
                p.expert_tensor_parallel_degree,
                tensor == 1
                    ? ""
                    : fmt::format(" / tensor_parallel_degree = {}", tensor)),
      config::experts_span_sequences(p)
          ? fmt::format(" / context_parallel_degree = {}", context)
          : "",
      shard,
      world,
      context == 1 || config::experts_span_sequences(p)
          ? ""
          : fmt::format(
                ", or be a multiple of context_parallel_degree = {}",
                context));
  const std::int64_t ranks_batch =
      resolved.training.local_batch_size * data_ranks;
  std::int64_t& global_batch = resolved.training.global_batch_size;
  if (global_batch == -1) {
    global_batch = ranks_batch;
  }
  FLATSHARD_CHECK(
      global_batch % ranks_batch == 0,
      config,
      "training.global_batch_size = {} must be a multiple of "
      "local_batch_size * ranks{}{} = {} * {}",
      global_batch,
      tensor == 1 ? "" : " / tensor_parallel_degree",
      context == 1 ? "" : " / context_parallel_degree",
      resolved.training.local_batch_size,
      data_ranks);
  FLATSHARD_CHECK(
      !resolved.parallelism.overlap_expert_parallel ||
          global_batch / ranks_batch >= 2,
      config,
      "parallelism.overlap_expert_parallel needs 2 microbatches or more, got "
      "training.global_batch_size = {} with local_batch_size * ranks = {}; "
      "double the one or halve the other",
      global_batch,
      ranks_batch);
  validate_config(resolved);
  return resolved;
}

}  // namespace flatshard
