#pragma once

#include "flatshard/layout/granularity.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/runtime/copy_engines_choice.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

/// Transport for tokens, or for activations of tensor or context parallelism.
enum class TransferKind { automatic, collective, copies };

template <>
inline constexpr Word<TransferKind> kWords<TransferKind>[] = {
    {"auto", TransferKind::automatic},
    {"collective", TransferKind::collective},
    {"copies", TransferKind::copies}};

/// How the ranks that share sequences compute attention.
enum class ContextMethod {
  automatic,
  a2a,             ///< all-to-all: each rank has all tokens of some heads
  a2a_all_gather,  ///< inside a host; between hosts keys and values
};

template <>
inline constexpr Word<ContextMethod> kWords<ContextMethod>[] = {
    {"auto", ContextMethod::automatic},
    {"a2a", ContextMethod::a2a},
    {"a2a+all_gather", ContextMethod::a2a_all_gather}};

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
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/parallelism.def"

  /// Returns whether several ranks have parts of each layer.
  bool shares_layers() const {
    return tensor_parallel_degree > 1;
  }
  /// Returns whether several ranks have parts of each sequence.
  bool shares_sequences() const {
    return context_parallel_degree > 1;
  }
  /// Returns whether ranks that share sequences all-gather keys and values.
  bool gathers_keys() const {
    return shares_sequences() &&
           context_parallel_method == ContextMethod::a2a_all_gather;
  }
  /// Returns the number of ranks that exchange heads.
  std::int64_t head_ranks() const {
    return context_parallel_a2a_degree == 0 ? context_parallel_degree
                                            : context_parallel_a2a_degree;
  }
  /// Returns the number of hosts that share sequences: groups of head_ranks.
  std::int64_t context_hosts() const {
    return context_parallel_degree / head_ranks();
  }
  /// Returns whether the ranks that share layers copy activations to each
  /// other.
  bool copies_activations() const {
    return tensor_parallel_comm == TransferKind::copies;
  }
  /// Returns whether the ranks that share sequences copy heads to each other.
  bool copies_heads() const {
    return shares_sequences() && context_parallel_comm == TransferKind::copies;
  }
  /// Returns the number of ranks that read different samples, of `world` ranks.
  std::int64_t num_data_ranks(std::int64_t world) const {
    return num_token_ranks(world) / context_parallel_degree;
  }
  /// Returns the number of ranks that read different tokens, of `world` ranks.
  std::int64_t num_token_ranks(std::int64_t world) const {
    return world / tensor_parallel_degree;
  }
  /// Returns whether transfers are chosen to be copies.
  bool copies() const {
    return copy_engines && copy_engines->any();
  }
};

struct Comm {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/comm.def"
};

/// Fills in context_parallel_a2a_degree if keys and values are all-gathered.
/// @param ranks_per_host  0: unknown, or hosts have different numbers.
/// @throws Error{config} if it is needed and 0, or all ranks exchange heads.
void resolve_head_ranks(
    Parallelism& p,
    std::int64_t world,
    std::int64_t ranks_per_host);

/// [parallelism] and [comm].
KeyTable parallelism_keys();

}  // namespace flatshard::config
