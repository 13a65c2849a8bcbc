#include "flatshard/train/config/optimizer_keys.h"

#include "flatshard/core/error.h"
#include "flatshard/train/config/rows.h"

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
    KEY(optimizer.name, "optimizer"),
    KEY(optimizer.lr, "peak learning rate"),
    KEY(optimizer.beta1,
        "adamw: decay of the first moment",
        .range = {.max = 1},
        .used_if = {kOfAdamW}),
    KEY(optimizer.beta2,
        "adamw: decay of the second moment",
        .range = {.max = 1},
        .used_if = {kOfAdamW}),
    KEY(optimizer.eps,
        "adamw: added to the denominator",
        .used_if = {kOfAdamW}),
    KEY(optimizer.weight_decay,
        "decoupled weight decay of the weights that have it"),
    KEY(optimizer.momentum,
        "sgd: momentum",
        .range = {.max = 1},
        .used_if = {kOfSgd}),
    KEY(optimizer.overlap,
        "update on a separate stream, in parallel with the next forward: a "
        "unit's gather waits for its own weights only"),

    KEY(lr_scheduler.name, "shape of the learning rate after warm-up"),
    KEY(lr_scheduler.warmup_steps,
        "steps over which the learning rate rises linearly",
        .range = {.max = kMaxSteps},
        .conflicts =
            {{{"training.steps"},
              WHEN(c.lr_scheduler.warmup_steps > c.training.steps),
              "the warm-up is longer than the run"}}),
    KEY(lr_scheduler.decay_ratio,
        "share of the steps, at the end, over which the learning rate falls; "
        "unset: linear and cosine fall from the end of warm-up, wsd over the "
        "last 0.2",
        .range = {.max = 1},
        .used_if = {kOfDecays}),
    KEY(lr_scheduler.min_lr_factor,
        "the learning rate at the end, as a share of optimizer.lr",
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
