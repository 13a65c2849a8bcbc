#include "flatshard/train/plan/sweep.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/expert_ranks.h"
#include "flatshard/train/plan/planned_run.h"
#include "flatshard/train/setup/model_config.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>

namespace flatshard {
namespace {

constexpr std::int64_t kLargestBatch = 16;
/// Number of the fastest choices that are also tried in FP8, and with smaller
/// states.
constexpr std::size_t kTriedFurther = 6;

Config config_of(const Config& config, const RunChoice& choice) {
  Config changed = config;
  config::Parallelism& p = changed.parallelism;
  p.strategy = config::StrategyChoice(choice.strategy);
  p.data_parallel_replicate_degree = choice.replicas;
  p.data_parallel_shard_degree = -1;
  p.tensor_parallel_degree = choice.tensor_degree;
  p.reshard_after_forward = choice.reshard_after_forward;
  p.expert_parallel_degree = choice.expert_degree;
  p.expert_tensor_parallel_degree = choice.expert_tensor_degree;
  p.overlap_expert_parallel = choice.overlap;
  p.delay_wgrad = choice.overlap;
  if (!choice.overlap) {
    p.microbatches_in_flight = config::Parallelism{}.microbatches_in_flight;
  }
  changed.training.local_batch_size = choice.local_batch_size;
  changed.activation_checkpoint.mode = choice.recompute;
  changed.activation_checkpoint.layers = choice.recomputed_layers;
  if (choice.recompute != models::ActivationCheckpoint::full ||
      choice.overlap) {
    changed.activation_checkpoint.save.clear();
  }
  if (choice.recompute == models::ActivationCheckpoint::none) {
    changed.activation_checkpoint.mlp_chunk_tokens = 0;
  }
  if (choice.recompute == models::ActivationCheckpoint::none ||
      choice.overlap) {
    changed.activation_checkpoint.offload = false;
  }
  changed.float8.recipe = choice.float8;
  changed.optimizer.state_dtype = choice.state_dtype;
  return changed;
}

class Sweeper {
 public:
  Sweeper(const Config& config, const PlannedMachines& machines)
      : config_(config), machines_(machines) {}

  Sweep run() {
    // Errors of the config itself are reported at once.
    const RunPlan own = plan_run(config_, machines_);
    experts_ = own.model.moe.num_experts;
    ffn_dim_ = own.model.moe.ffn_dim;
    for (const RunChoice& layout : layouts()) {
      for (const auto recompute :
           {models::ActivationCheckpoint::none,
            models::ActivationCheckpoint::selective,
            models::ActivationCheckpoint::full}) {
        RunChoice choice = layout;
        choice.recompute = recompute;
        if (recompute != models::ActivationCheckpoint::none &&
            !choice.overlap) {
          choice.recomputed_layers = config_.activation_checkpoint.layers;
        }
        // Recompute makes no memory table smaller.
        if (try_batches(choice) == Outcome::table_too_large) {
          break;
        }
      }
    }
    sort();
    const std::vector<RunChoice> fastest = fastest_choices();
    try_states(fastest);
    try_float8(fastest);
    sort();
    return std::move(sweep_);
  }

 private:
  enum class Outcome {
    refused,  ///< by the trainer
    fits,
    too_large,        ///< with activations
    table_too_large,  ///< without
  };

  std::vector<RunChoice> layouts() const {
    std::vector<RunChoice> all;
    for (const std::int64_t degree : tensor_degrees()) {
      for (const RunChoice& choice : layouts_over(degree)) {
        all.push_back(choice);
        // With frozen weights, running blocks in pieces has no benefit.
        if (choice.expert_degree * choice.expert_tensor_degree > 1 &&
            !config_.lora.enabled()) {
          all.push_back(choice);
          all.back().overlap = true;
        }
      }
    }
    return all;
  }

  /// Over the ranks that are left where `tensor_degree` share each layer. Ranks
  /// that share sequences shard the weights like ranks that read others.
  std::vector<RunChoice> layouts_over(std::int64_t tensor_degree) const {
    std::vector<RunChoice> choices;
    const std::int64_t context = config_.parallelism.context_parallel_degree;
    const std::int64_t sharing = tensor_degree * context;
    const std::int64_t ranks = machines_.ranks / sharing;
    const std::int64_t sharding = ranks * context;
    for (RunChoice choice : expert_choices(tensor_degree, ranks)) {
      const std::int64_t degree = expert_data_ranks(choice);
      for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
        choices.push_back(choice);
        choices.back().strategy = strategy;
        if (sharding == 1) {
          break;
        }
      }
      if (sharding > 1) {
        choices.push_back(choice);
        choices.back().reshard_after_forward = false;
      }
      // Shards inside groups of hosts, replicas of them between.
      const std::int64_t host = machines_.ranks_per_host / sharing;
      const std::int64_t least = tensor_degree > 1 && context == 1 ? 2 : 1;
      for (std::int64_t shards = std::max(host, least); shards < ranks;
           shards *= 2) {
        if (ranks % shards == 0 && shards % degree == 0) {
          for (const char* strategy : {"zero2", "zero3", "hfsdp"}) {
            choices.push_back(choice);
            choices.back().strategy = strategy;
            choices.back().replicas = ranks / shards;
          }
        }
      }
    }
    return choices;
  }

  /// Returns the groups inside a host, of as many ranks as divide the model.
  std::vector<std::int64_t> tensor_degrees() const {
    std::vector<std::int64_t> degrees{1};
    const std::int64_t most =
        std::min(machines_.ranks_per_host, machines_.ranks);
    for (std::int64_t degree = 2; degree <= most; degree *= 2) {
      if (machines_.ranks %
                  (degree * config_.parallelism.context_parallel_degree) ==
              0 &&
          divides_model(degree)) {
        degrees.push_back(degree);
      }
    }
    return degrees;
  }

  bool divides_model(std::int64_t degree) const {
    Config changed = config_;
    changed.parallelism.tensor_parallel_degree = degree;
    if (changed.training.seq_len % degree != 0) {
      return false;
    }
    try {
      config::resolve_head_ranks(
          changed.parallelism,
          machines_.ranks,
          machines_.ranks_per_host);
      model_config(changed);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::config) {
        throw;
      }
      return false;
    }
    return true;
  }

  /// Returns how many ranks that read different samples have different parts
  /// of the experts.
  std::int64_t expert_data_ranks(const RunChoice& choice) const {
    config::Parallelism p = config_.parallelism;
    p.tensor_parallel_degree = choice.tensor_degree;
    p.expert_parallel_degree = choice.expert_degree;
    p.expert_tensor_parallel_degree = choice.expert_tensor_degree;
    return config::expert_data_ranks(p);
  }

  std::vector<std::int64_t> expert_degrees(std::int64_t ranks) const {
    std::vector<std::int64_t> degrees{1};
    const std::int64_t most =
        ranks * config_.parallelism.context_parallel_degree;
    for (std::int64_t degree = 2; degree <= std::min(experts_, most);
         degree *= 2) {
      if (experts_ % degree == 0 &&
          ranks % expert_data_ranks({.expert_degree = degree}) == 0 &&
          degree <= 8 * machines_.ranks_per_host) {
        degrees.push_back(degree);
      }
    }
    return degrees;
  }

  /// Returns how ranks divide the experts. Their width is split over the ranks
  /// that share layers, or over two, only at the largest expert degree: below
  /// it, a larger expert degree exchanges fewer rows.
  std::vector<RunChoice> expert_choices(
      std::int64_t tensor_degree,
      std::int64_t ranks) const {
    std::vector<RunChoice> choices;
    for (const std::int64_t degree : expert_degrees(ranks)) {
      choices.push_back(
          {.tensor_degree = tensor_degree, .expert_degree = degree});
    }
    RunChoice cut = choices.back();
    cut.expert_tensor_degree = std::max<std::int64_t>(tensor_degree, 2);
    if (experts_ > 0 && ranks % expert_data_ranks(cut) == 0 &&
        ffn_dim_ % cut.expert_tensor_degree == 0) {
      choices.push_back(cut);
    }
    return choices;
  }

  /// A larger batch never fits where a smaller one does not.
  /// @return the outcome of one sequence.
  Outcome try_batches(RunChoice choice) {
    const Outcome first = plan_with_states(choice);
    for (Outcome outcome = first;
         (outcome == Outcome::fits || outcome == Outcome::refused) &&
         choice.local_batch_size < kLargestBatch;) {
      choice.local_batch_size *= 2;
      outcome = plan_with_states(choice);
    }
    return first;
  }

  /// Returns the formats of AdamW's states to try, the largest first.
  std::vector<StateFormat> state_formats() const {
    std::vector<StateFormat> formats{
        StateFormat::float32,
        StateFormat::bfloat16,
        StateFormat::int8};
    const config::Optimizer& optimizer = config_.optimizer;
    formats.erase(
        formats.begin(),
        std::ranges::find(formats, optimizer.state_dtype));
    // All parameters of a unit with other formats require AdamW.
    if (optimizer.uses(Algorithm::sgd) || optimizer.uses(Algorithm::muon)) {
      formats.resize(1);
    }
    return formats;
  }

  /// Plans the choice with the largest states that fit. If none fit, only the
  /// last ones are listed.
  Outcome plan_with_states(RunChoice choice) {
    Outcome outcome = Outcome::refused;
    for (const StateFormat format : state_formats()) {
      choice.state_dtype = format;
      const std::size_t larger = sweep_.too_large.size();
      const Outcome next = plan(choice);
      if (next == Outcome::refused) {
        break;
      }
      if (outcome != Outcome::refused) {
        sweep_.too_large.erase(sweep_.too_large.begin() + larger - 1);
      }
      outcome = next;
      if (outcome == Outcome::fits || !fits_without_states()) {
        break;
      }
    }
    return outcome;
  }

  /// Returns whether smaller states could help the last choice that is too
  /// large.
  bool fits_without_states() const {
    const plan::Estimate& estimate = sweep_.too_large.back().estimate;
    std::int64_t nbytes = estimate.peak_nbytes;
    for (const plan::RoleBytes& row : estimate.memory) {
      nbytes -= row.role == "optimizer state" ? row.nbytes : 0;
    }
    return nbytes <= estimate.room_nbytes;
  }

  /// Returns the fastest choices with the config's states, and those that are
  /// faster with smaller ones.
  std::vector<RunChoice> fastest_choices() const {
    std::vector<RunChoice> fastest;
    std::size_t num_own = 0;
    for (const PlannedChoice& planned : sweep_.fitting) {
      const bool is_own =
          planned.choice.state_dtype == config_.optimizer.state_dtype;
      if (is_own ? num_own < kTriedFurther : fastest.size() < kTriedFurther) {
        fastest.push_back(planned.choice);
        num_own += is_own ? 1 : 0;
      }
    }
    return fastest;
  }

  void try_states(const std::vector<RunChoice>& choices) {
    for (RunChoice choice : choices) {
      const StateFormat largest = choice.state_dtype;
      for (const StateFormat format : state_formats()) {
        choice.state_dtype = format;
        if (format > largest) {
          plan(choice);
        }
      }
    }
  }

  void try_float8(const std::vector<RunChoice>& choices) {
    for (RunChoice choice : choices) {
      for (const auto& [recipe, rates] : machines_.gpu.float8) {
        choice.float8 = float8::recipe_of(recipe);
        plan(choice);
      }
    }
  }

  Outcome plan(const RunChoice& choice) {
    PlannedChoice planned{.choice = choice};
    try {
      Config changed = config_of(config_, choice);
      if (choice.overlap && changed.training.global_batch_size == -1) {
        // At least two microbatches are needed to overlap them.
        changed.training.global_batch_size =
            2 * choice.local_batch_size *
            changed.parallelism.num_data_ranks(machines_.ranks);
      }
      changed =
          resolve_config(changed, machines_.ranks, machines_.ranks_per_host);
      const models::ModelConfig model = model_config(changed);
      auto& modules = modules_[{
          choice.tensor_degree,
          choice.expert_degree,
          choice.expert_tensor_degree}];
      if (!modules) {
        modules = std::make_shared<PlannedModel>(
            changed.parallelism,
            changed.lora,
            model);
      }
      const plan::Job job =
          plan_job(changed, model, machines_.ranks, machines_.host(), modules);
      planned.tokens_per_step =
          job.tokens_per_rank * static_cast<double>(job.ranks);
      planned.estimate = plan::estimate_if_table_fits(job, machines_.gpu);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::config) {
        throw;
      }
      ++sweep_.refusals[error.message()];
      return Outcome::refused;
    }
    planned.estimate.step.operations.clear();
    planned.estimate.step.spans.clear();
    const bool fits = planned.estimate.fits();
    const Outcome outcome = fits ? Outcome::fits
                            : planned.estimate.step.seconds > 0
                                ? Outcome::too_large
                                : Outcome::table_too_large;
    (fits ? sweep_.fitting : sweep_.too_large).push_back(std::move(planned));
    return outcome;
  }

  void sort() {
    std::ranges::stable_sort(
        sweep_.fitting,
        std::greater<>(),
        [](const PlannedChoice& planned) {
          return planned.estimate.tokens_per_second;
        });
    std::ranges::stable_sort(
        sweep_.too_large,
        {},
        [](const PlannedChoice& planned) {
          return planned.estimate.peak_nbytes;
        });
  }

  const Config& config_;
  const PlannedMachines& machines_;
  std::int64_t experts_ = 0;
  std::int64_t ffn_dim_ = 0;  ///< per expert
  /// The key has the degrees of tensor and expert parallelism, and of experts'
  /// width.
  std::map<std::array<std::int64_t, 3>, std::shared_ptr<PlannedModel>> modules_;
  Sweep sweep_;
};

}  // namespace

Sweep sweep(const Config& config, const PlannedMachines& machines) {
  return Sweeper(config, machines).run();
}

}  // namespace flatshard
