#pragma once

#include "flatshard/layout/granularity.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/runtime/copy_engines_choice.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

/// Transport for tokens, or for activations of tensor parallelism.
enum class TransferKind { automatic, collective, copies };

template <>
inline constexpr Word<TransferKind> kWords<TransferKind>[] = {
    {"auto", TransferKind::automatic},
    {"collective", TransferKind::collective},
    {"copies", TransferKind::copies}};

template <>
inline constexpr Word<std::optional<CopyEngines>>
    kWords<std::optional<CopyEngines>>[] = {
        {"auto", std::nullopt},
        {"none", CopyEngines{}},
        {"forward", CopyEngines{.gathers = CopyEngines::Gathers::forward}},
        {"all", CopyEngines::all()}};

/// A row of the table of named strategies, by the name that the user gave.
class StrategyChoice {
 public:
  StrategyChoice() : StrategyChoice("zero3") {}
  /// @throws Error{config} for an unknown name, with those that exist.
  explicit StrategyChoice(std::string_view name)
      : row_(&find_strategy_name(name)), by_other_name_(name != row_->name) {}

  std::string_view name() const {
    return by_other_name_ ? row_->other_name : row_->name;
  }
  const StrategyName* operator->() const { return row_; }

 private:
  const StrategyName* row_;
  bool by_other_name_;
};

struct Parallelism {
  StrategyChoice strategy;
  std::int64_t data_parallel_replicate_degree = 1;
  std::int64_t data_parallel_shard_degree = -1;
  std::int64_t tensor_parallel_degree = 1;
  TransferKind tensor_parallel_comm = TransferKind::automatic;
  std::int64_t context_parallel_degree = 1;
  std::int64_t pipeline_parallel_degree = 1;
  std::int64_t expert_parallel_degree = 1;
  std::int64_t expert_tensor_parallel_degree = 1;
  TransferKind token_exchange = TransferKind::automatic;
  bool overlap_expert_parallel = false;
  std::int64_t microbatches_in_flight = 2;
  bool delay_wgrad = false;
  std::int64_t prefetch = 1;
  bool reshard_after_forward = true;
  std::int64_t post_forward_ranks = 0;
  double memory_budget = 0.0;
  bool keep_compute_weights = true;
  std::optional<CopyEngines> copy_engines;  ///< unset: auto
  Granularity granularity;
  double max_padding = 0.05;

  /// Returns whether several ranks have parts of each layer.
  bool shares_layers() const { return tensor_parallel_degree > 1; }
  /// Returns whether the ranks that share layers copy activations to each
  /// other.
  bool copies_activations() const {
    return tensor_parallel_comm == TransferKind::copies;
  }
  /// Returns the number of ranks that read different samples, of `world` ranks.
  std::int64_t num_data_ranks(std::int64_t world) const {
    return world / tensor_parallel_degree;
  }
  /// Returns whether transfers are chosen to be copies.
  bool copies() const { return copy_engines && copy_engines->any(); }
};

struct Comm {
  double timeout_s = 300;
  bool watcher = true;
};

/// [parallelism] and [comm].
KeyTable parallelism_keys();

}  // namespace flatshard::config
