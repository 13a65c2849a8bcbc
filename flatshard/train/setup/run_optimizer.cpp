#include "flatshard/train/setup/run_optimizer.h"

#include "flatshard/optim/adamw.h"
#include "flatshard/optim/sgd.h"

namespace flatshard {

std::unique_ptr<Optimizer> make_optimizer(
    const Config& config,
    const std::vector<ParamGroup*>& groups) {
  const config::Optimizer& o = config.optimizer;
  if (o.name == config::OptimizerName::sgd) {
    return std::make_unique<Sgd>(
        groups,
        SgdOptions{.momentum = o.momentum, .weight_decay = o.weight_decay});
  }
  return std::make_unique<AdamW>(
      groups,
      AdamWOptions{
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = o.weight_decay});
}

LrSchedule lr_schedule(const Config& config) {
  LrSchedule schedule{
      .kind = config.lr_scheduler.name,
      .base_lr = config.optimizer.lr,
      .total_steps = config.training.steps,
      .warmup_steps = config.lr_scheduler.warmup_steps,
      .decay_ratio = config.lr_scheduler.decay_ratio,
      .min_lr_factor = config.lr_scheduler.min_lr_factor};
  schedule.validate();
  return schedule;
}

}  // namespace flatshard
