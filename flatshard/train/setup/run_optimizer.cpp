#include "flatshard/train/setup/run_optimizer.h"

#include "flatshard/optim/adamw.h"
#include "flatshard/optim/sgd.h"

namespace flatshard {

std::unique_ptr<Optimizer> make_optimizer(
    const config::Optimizer& keys,
    const std::vector<ParamGroup*>& groups) {
  if (keys.name == config::OptimizerName::sgd) {
    return std::make_unique<Sgd>(
        groups,
        SgdOptions{
            .momentum = keys.momentum,
            .weight_decay = keys.weight_decay});
  }
  return std::make_unique<AdamW>(
      groups,
      AdamWOptions{
          .beta1 = keys.beta1,
          .beta2 = keys.beta2,
          .eps = keys.eps,
          .weight_decay = keys.weight_decay});
}

LrSchedule lr_schedule(
    const config::LrScheduler& keys,
    double base_lr,
    std::int64_t total_steps) {
  LrSchedule schedule{
      .kind = keys.name,
      .base_lr = base_lr,
      .total_steps = total_steps,
      .warmup_steps = keys.warmup_steps,
      .decay_ratio = keys.decay_ratio,
      .min_lr_factor = keys.min_lr_factor};
  schedule.validate();
  return schedule;
}

}  // namespace flatshard
