#pragma once

#include "flatshard/optim/lr_schedule.h"
#include "flatshard/optim/parameter_values.h"
#include "flatshard/optim/state_format.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

using OptimizerName = Algorithm;
template <>
inline constexpr Word<Algorithm> kWords<Algorithm>[] = {
    {"adamw", Algorithm::adamw},
    {"sgd", Algorithm::sgd},
    {"muon", Algorithm::muon}};

template <>
inline constexpr Word<AdjustLr> kWords<AdjustLr>[] = {
    {"original", AdjustLr::original},
    {"match_rms_adamw", AdjustLr::match_rms_adamw}};

template <>
inline constexpr Word<Decay> kWords<Decay>[] = {
    {"all", Decay::all},
    {"matrices", Decay::matrices}};

template <>
inline constexpr Word<StateFormat> kWords<StateFormat>[] = {
    {"float32", StateFormat::float32},
    {"bfloat16", StateFormat::bfloat16},
    {"int8", StateFormat::int8}};

inline constexpr double kMuonMomentum = 0.95;

struct Optimizer {
  OptimizerName name = OptimizerName::adamw;
  double lr = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  /// Default: 0 with SGD and kMuonMomentum with Muon.
  std::optional<double> momentum;
  bool nesterov = true;
  std::int64_t ns_steps = 5;
  double muon_eps = 1e-7;
  AdjustLr adjust_lr_fn = AdjustLr::match_rms_adamw;
  Decay decay = Decay::all;
  std::vector<ParameterRule> param_groups;
  StateFormat state_dtype = StateFormat::float32;
  bool stochastic_rounding = false;
  bool overlap = false;

  /// Returns whether a parameter group may have the algorithm.
  bool uses(Algorithm algorithm) const;
  /// Returns the bytes of the states per element, of most parameters with the
  /// values of [optimizer].
  double state_nbytes() const;
  /// Returns the same of the parameter group with the fewest.
  double fewest_state_nbytes() const;
  /// Returns whether a parameter group may have AdamW states in this format.
  bool uses(StateFormat format) const;
  /// Returns whether states need shards of full blocks: of int8, and where
  /// formats of several parameters meet.
  bool needs_state_blocks() const;
};

template <>
inline constexpr Word<LrSchedule::Kind> kWords<LrSchedule::Kind>[] = {
    {"constant", LrSchedule::Kind::constant},
    {"linear", LrSchedule::Kind::linear},
    {"cosine", LrSchedule::Kind::cosine},
    {"wsd", LrSchedule::Kind::wsd}};

template <>
inline constexpr Word<LrSchedule::Decay> kWords<LrSchedule::Decay>[] = {
    {"linear", LrSchedule::Decay::linear},
    {"sqrt", LrSchedule::Decay::sqrt},
    {"cosine", LrSchedule::Decay::cosine},
    {"exponential", LrSchedule::Decay::exponential}};

struct LrScheduler {
  LrSchedule::Kind name = LrSchedule::Kind::cosine;
  std::int64_t warmup_steps = 0;
  std::optional<double> decay_ratio;
  double min_lr_factor = 0.0;
  LrSchedule::Decay decay_type = LrSchedule::Decay::linear;
};

/// [optimizer] and [lr_scheduler].
KeyTable optimizer_keys();

}  // namespace flatshard::config
