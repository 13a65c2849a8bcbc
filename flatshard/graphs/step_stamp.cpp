#include "flatshard/graphs/step_stamp.h"

#include "flatshard/graphs/module_modes.h"
#include "flatshard/runtime/runtime.h"

namespace flatshard {

StepStamp StepStamp::of(
    const Runtime& runtime,
    const std::vector<nn::Module*>& modules) {
  const RuntimeCore& core = runtime.core();
  StepStamp stamp{
      .num_plans = runtime.executor().slots().num_plans(),
      .num_rule_changes = core.num_rule_changes,
      .is_last_microbatch = core.step.is_last_microbatch,
      .sync_gradients = core.step.sync_gradients};
  for (const auto& unit : runtime.units()) {
    for (const UnitParameter& p : unit->parameters()) {
      stamp.requires_grad.push_back(p.tensor.requires_grad());
    }
    for (const auto& group : unit->groups()) {
      stamp.addresses.push_back(
          group->weights().main().local().const_data_ptr());
      for (const Plane& plane : group->weights().planes()) {
        stamp.addresses.push_back(
            plane.resting.defined() ? plane.resting.local().const_data_ptr()
                                    : nullptr);
      }
    }
  }
  stamp.training = modes_of(modules);
  return stamp;
}

std::string StepStamp::difference(const StepStamp& now) const {
  if (now.is_last_microbatch != is_last_microbatch ||
      now.sync_gradients != sync_gradients) {
    return "it starts with other microbatch flags";
  }
  if (now.requires_grad != requires_grad) {
    return "other parameters require a gradient";
  }
  if (now.training != training) {
    return "modules were set to train() or eval()";
  }
  if (now.addresses != addresses) {
    return "weights are at other addresses";
  }
  return {};
}

std::string StepStamp::obstacle(const Runtime& runtime) {
  if (!runtime.core().observers.empty()) {
    return "an observer of the Runtime watches events inside it";
  }
  for (const auto& unit : runtime.units()) {
    unit->pointers().check_storage();
    for (const auto& group : unit->groups()) {
      if (!group->gradients().is_empty()) {
        return "there are gradients of an earlier backward";
      }
      if (group->gradients().has_hook()) {
        return "a gradient has a hook";
      }
    }
  }
  if (runtime.executor().slots().pool().num_held() != 0) {
    return "weights are unsharded before it starts";
  }
  return {};
}

}  // namespace flatshard
