#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/exchange/stream_exchange.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/setup/float8_choice.h"
#include "flatshard/train/setup/run_lora.h"

namespace flatshard {

/// The objects that a run trains: a model, sharded over the ranks, and its
/// optimizer.
struct TrainState {
  models::Llama model{nullptr};
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<Optimizer> optimizer;
  CopyEngines copy_engines;
  /// Units that parallelism.memory_budget keeps from forward to backward.
  int num_kept_units = 0;
  std::shared_ptr<StreamExchange> exchange;  ///< null: experts are here
  nn::TensorParallelPtr ranks;     ///< tensor-parallel ranks; null: none
  nn::ContextParallelPtr context;  ///< context-parallel ranks; null: none
  int num_in_flight = 1;           ///< microbatches
  Float8Effect float8;
  std::optional<RunLora> lora;  ///< absent: all weights train

  /// Returns the groups that checkpoints contain: all groups, or with LoRA only
  /// the groups of adapters.
  std::vector<ParamGroup*> saved_groups() const {
    return lora ? runtime->groups() : runtime->all_groups();
  }
};

/// Returns its memory on this rank's device: the library's table, and the run's
/// additions to it. See memory_rows(Runtime).
std::vector<MemoryRow> memory_rows(
    const TrainState& state,
    const std::optional<GraphStats>& graphs = {});

/// Returns the bytes that parallelism.memory_budget leaves to keep more units
/// unsharded.
/// @param total  the largest memory table of a rank with no unit kept.
/// @throws Error{config} when it is less than `total`.
std::int64_t left_of_memory_budget(
    const config::Parallelism& keys,
    std::int64_t total);

/// Builds it from the config, with weights from the seed. Collective. The
/// config is resolved.
/// @param num_microbatches  of a step on each rank.
/// @throws Error{config} naming the key, also if parallelism.memory_budget is
/// less than the run needs without it.
TrainState make_train_state(
    const Config& config,
    const models::ModelConfig& model,
    const std::shared_ptr<Mesh>& mesh,
    std::int64_t num_microbatches);

}  // namespace flatshard
