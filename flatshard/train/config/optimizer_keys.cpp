#include "flatshard/train/config/optimizer_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kOfAdamW{
    "optimizer.name",
    WHEN(c.optimizer.name == OptimizerName::adamw),
    "adamw"};
constexpr UsedIf kOfSgd{
    "optimizer.name",
    WHEN(c.optimizer.name == OptimizerName::sgd),
    "sgd"};
constexpr UsedIf kOfDecays{
    "lr_scheduler.name",
    WHEN(c.lr_scheduler.name != LrSchedule::Kind::constant),
    "linear, cosine and wsd"};

const ConfigKey kOptimizerKeys[] = {
    KEY(optimizer.name, "Optimizer."),
    KEY(optimizer.lr, "Peak learning rate."),
    KEY(optimizer.beta1,
        "AdamW: decay rate of the first moment.",
        .range = {.max = 1},
        .used_if = {kOfAdamW}),
    KEY(optimizer.beta2,
        "AdamW: decay rate of the second moment.",
        .range = {.max = 1},
        .used_if = {kOfAdamW}),
    KEY(optimizer.eps,
        "AdamW: term added to the denominator.",
        .used_if = {kOfAdamW}),
    KEY(optimizer.weight_decay,
        "Decoupled weight decay, for the weights that are decayed."),
    KEY(optimizer.momentum,
        "SGD: momentum.",
        .range = {.max = 1},
        .used_if = {kOfSgd}),
    KEY(optimizer.overlap,
        "Update the weights on a separate stream, in parallel with the next "
        "forward. The all-gather of a unit waits only for the update of that "
        "unit."),

    KEY(lr_scheduler.name, "Learning-rate schedule after the warmup."),
    KEY(lr_scheduler.warmup_steps,
        "Number of steps of linear warmup.",
        .range = {.max = kMaxSteps},
        .conflicts =
            {{{"training.steps"},
              WHEN(c.lr_scheduler.warmup_steps > c.training.steps),
              "the warm-up is longer than the run"}}),
    KEY(lr_scheduler.decay_ratio,
        "Fraction of the steps, at the end of the run, over which the learning "
        "rate decays. Default: linear and cosine decay from the end of the "
        "warmup, wsd over the last 0.2.",
        .range = {.max = 1},
        .used_if = {kOfDecays}),
    KEY(lr_scheduler.min_lr_factor,
        "Final learning rate, as a fraction of optimizer.lr.",
        .range = {.max = 1},
        .used_if = {kOfDecays}),
};

void check_optimizer(const Config& config) {
  const Optimizer& optimizer = config.optimizer;
  FLATSHARD_CHECK(
      optimizer.name != OptimizerName::adamw ||
          (optimizer.beta1 < 1 && optimizer.beta2 < 1),
      config,
      "optimizer.beta1 and optimizer.beta2 must be below 1, got {} and {}",
      optimizer.beta1,
      optimizer.beta2);
}

}  // namespace

KeyTable optimizer_keys() {
  return {kOptimizerKeys, check_optimizer};
}

}  // namespace flatshard::config
