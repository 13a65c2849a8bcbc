#include "flatshard/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

constexpr double kWsdDecayRatio = 0.2;

}  // namespace

void LrSchedule::validate() const {
  FLATSHARD_CHECK(
      total_steps >= 1,
      config,
      "training.steps: expected at least 1, got {}",
      total_steps);
  FLATSHARD_CHECK(
      base_lr >= 0 && std::isfinite(base_lr),
      config,
      "optimizer.lr: expected a finite number >= 0, got {}",
      base_lr);
  FLATSHARD_CHECK(
      min_lr_factor >= 0 && min_lr_factor <= 1,
      config,
      "lr_scheduler.min_lr_factor: expected a number in [0, 1], got {}",
      min_lr_factor);
  FLATSHARD_CHECK(
      !decay_ratio || (*decay_ratio >= 0 && *decay_ratio <= 1),
      config,
      "lr_scheduler.decay_ratio: expected a number in [0, 1], got {}",
      decay_ratio.value_or(0));
  FLATSHARD_CHECK(
      warmup_steps >= 0 && warmup_steps <= total_steps,
      config,
      "lr_scheduler.warmup_steps: expected a number in [0, training.steps = "
      "{}], got {}",
      total_steps,
      warmup_steps);
  if (kind == Kind::constant) {
    FLATSHARD_CHECK(
        !decay_ratio && min_lr_factor == 0,
        config,
        "lr_scheduler.name = \"constant\" has no decay, but {} is set; remove "
        "it or choose linear, cosine or wsd",
        decay_ratio ? "decay_ratio" : "min_lr_factor");
  }
  FLATSHARD_CHECK(
      warmup_steps + decay_steps() <= total_steps,
      config,
      "lr_scheduler: warmup_steps = {} and a decay of {} steps (decay_ratio) "
      "are together longer than training.steps = {}",
      warmup_steps,
      decay_steps(),
      total_steps);
}

std::int64_t LrSchedule::decay_steps() const {
  if (kind == Kind::constant) {
    return 0;
  }
  if (kind != Kind::wsd && !decay_ratio) {
    return total_steps - warmup_steps;
  }
  const double ratio = decay_ratio.value_or(kWsdDecayRatio);
  const std::int64_t steps =
      std::llround(ratio * static_cast<double>(total_steps));
  return ratio > 0 && total_steps > warmup_steps
             ? std::max<std::int64_t>(1, steps)
             : steps;
}

double LrSchedule::factor(std::int64_t step) const {
  if (step < warmup_steps) {
    return static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  const std::int64_t decay = decay_steps();
  const std::int64_t decay_begin = total_steps - decay;
  if (decay == 0 || step < decay_begin) {
    return 1.0;
  }
  const double p = std::min(
      1.0,
      static_cast<double>(step + 1 - decay_begin) / static_cast<double>(decay));
  const double m = min_lr_factor;
  switch (shape()) {
    case Decay::linear:
      return 1.0 - (1.0 - m) * p;
    case Decay::sqrt:
      return m + (1.0 - m) * (1.0 - std::sqrt(p));
    case Decay::cosine:
      return m + (1.0 - m) * 0.5 * (1.0 + std::cos(std::numbers::pi * p));
    case Decay::exponential:
      return m + (1.0 - m) * (2.0 * std::pow(0.5, p) - 1.0);
  }
  FLATSHARD_THROW(internal, "expected a decay of the enum");
}

LrSchedule::Decay LrSchedule::shape() const {
  return kind == Kind::wsd      ? decay
         : kind == Kind::cosine ? Decay::cosine
                                : Decay::linear;
}

}  // namespace flatshard
