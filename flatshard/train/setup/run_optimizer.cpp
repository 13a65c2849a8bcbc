#include "flatshard/train/setup/run_optimizer.h"

namespace flatshard {

std::unique_ptr<Optimizer> make_optimizer(
    const config::Optimizer& keys,
    const std::vector<ParamGroup*>& groups,
    const StoredEntriesOf& entries_of) {
  ParameterRules rules{
      .rest =
          {.algorithm = keys.name,
           .weight_decay = keys.weight_decay,
           .beta1 = keys.beta1,
           .beta2 = keys.beta2,
           .eps = keys.eps,
           .momentum = keys.momentum,
           .state_dtype = keys.state_dtype},
      .rules = keys.param_groups,
      .decay = keys.decay};
  rules.entry_names = [&](const GroupParameter& parameter) {
    std::vector<std::string> names;
    for (StoredEntry& entry :
         entries_of(parameter.names.front(), parameter.whole_shape())) {
      names.push_back(std::move(entry.name));
    }
    return names;
  };
  return std::make_unique<Optimizer>(groups, rules);
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
      .min_lr_factor = keys.min_lr_factor,
      .decay = keys.decay_type};
  schedule.validate();
  return schedule;
}

}  // namespace flatshard
