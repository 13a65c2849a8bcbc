#pragma once

#include <cstdint>
#include <optional>

namespace flatshard {

/// Learning rate as a function of the step, nothing else: no state to save.
///
/// S = total_steps, W = warmup_steps, D = decay_steps() and m = min_lr_factor.
/// Step s in [0, S) has lr = base_lr * factor(s):
///
///   warm-up  s < W       factor = (s + 1) / W
///   stable   s < S - D   factor = 1
///   decay    else        p = (s + 1 - (S - D)) / D, at most 1
///     factor = m + (1 - m) f(p)
///
///     linear        f = 1 - p
///     sqrt          f = 1 - sqrt(p)
///     cosine        f = (1 + cos(pi p)) / 2
///     exponential   f = 2 * 0.5^p - 1
///
/// The schedules `linear` and `cosine` decay by the formula of their name, and
/// `wsd` by `decay`.
/// `constant` has D = 0. `linear` and `cosine` have D = S - W (no stable
/// phase), or D = round(decay_ratio * S) if decay_ratio is set. `wsd` (warm-up,
/// stable, decay) has D = round(decay_ratio * S), by default a fifth of the
/// run. A decay_ratio above 0 gives at least one step.
///
/// So the last step of the warm-up has base_lr, and the last step of the run
/// m * base_lr, as in torchtitan. transformers has s / W and (s - (S - D)) / D:
/// its first step has a rate of 0, and its last one comes close to the minimum.
/// Sources: torchtitan, components/lr_scheduler.py; cosine: Loshchilov and
/// Hutter, arXiv:1608.03983; wsd: Hu et al., arXiv:2404.06395; sqrt: Hägele et
/// al., arXiv:2405.18392; exponential: Megatron-LM,
/// core/optimizer_param_scheduler.py, lr_wsd_decay_style.
struct LrSchedule {
  enum class Kind { constant, linear, cosine, wsd };
  enum class Decay { linear, sqrt, cosine, exponential };

  Kind kind = Kind::constant;
  double base_lr = 0;
  std::int64_t total_steps = 1;
  std::int64_t warmup_steps = 0;
  std::optional<double> decay_ratio;
  double min_lr_factor = 0;
  Decay decay = Decay::linear;  ///< wsd

  /// @throws Error{config} when a number is out of range, when warm-up and
  /// decay together are longer than the run, or when `constant` has a decay.
  void validate() const;

  std::int64_t decay_steps() const;
  double factor(std::int64_t step) const;
  double lr(std::int64_t step) const { return base_lr * factor(step); }

 private:
  Decay shape() const;
};

}  // namespace flatshard
