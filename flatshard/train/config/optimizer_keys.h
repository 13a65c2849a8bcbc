#pragma once

#include <array>

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
    {"match_rms_adamw", AdjustLr::match_rms_adamw},
    {"spectral_unclamped", AdjustLr::spectral_unclamped}};

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

using Coefficients = std::array<double, 3>;

struct Optimizer {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/optimizer.def"

  /// Returns whether a parameter group may have the algorithm.
  bool uses(Algorithm algorithm) const;
  /// Returns the bytes of the states per element, of most parameters with the
  /// values of [optimizer].
  double state_nbytes() const;
  /// Returns the same of the parameter group with the fewest.
  double fewest_state_nbytes() const;
  /// Returns whether a parameter group has states.
  bool has_states() const;
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
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/lr_scheduler.def"
};

/// [optimizer] and [lr_scheduler].
KeyTable optimizer_keys();

}  // namespace flatshard::config
