#pragma once

#include "flatshard/optim/lr_schedule.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

enum class OptimizerName { adamw, sgd };
template <>
inline constexpr Word<OptimizerName> kWords<OptimizerName>[] = {
    {"adamw", OptimizerName::adamw},
    {"sgd", OptimizerName::sgd}};

struct Optimizer {
  OptimizerName name = OptimizerName::adamw;
  double lr = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.0;
  bool overlap = false;

  /// Returns how many float32 numbers it keeps for each parameter.
  std::int64_t num_states() const {
    return name == OptimizerName::adamw ? 2 : momentum > 0 ? 1 : 0;
  }
};

template <>
inline constexpr Word<LrSchedule::Kind> kWords<LrSchedule::Kind>[] = {
    {"constant", LrSchedule::Kind::constant},
    {"linear", LrSchedule::Kind::linear},
    {"cosine", LrSchedule::Kind::cosine},
    {"wsd", LrSchedule::Kind::wsd}};

struct LrScheduler {
  LrSchedule::Kind name = LrSchedule::Kind::cosine;
  std::int64_t warmup_steps = 0;
  std::optional<double> decay_ratio;
  double min_lr_factor = 0.0;
};

/// [optimizer] and [lr_scheduler].
KeyTable optimizer_keys();

}  // namespace flatshard::config
