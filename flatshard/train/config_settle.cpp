// What --set means for keys that it does not name.
#include <algorithm>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/optim/lr_schedule.h"
#include "flatshard/train/config_check.h"
#include "flatshard/train/config_field.h"
#include "flatshard/train/config_unused.h"

namespace flatshard {
namespace {

/// Steps that a warm-up may take beside the decay.
std::int64_t longest_warmup(const Config& config) {
  const bool has_decay = config.lr_scheduler.name == "wsd" ||
                         (config.lr_scheduler.name != "constant" &&
                          config.lr_scheduler.decay_ratio);
  const LrSchedule schedule{
      .kind = LrSchedule::parse_kind(config.lr_scheduler.name),
      .total_steps = config.training.steps,
      .decay_ratio = config.lr_scheduler.decay_ratio};
  return config.training.steps - (has_decay ? schedule.decay_steps() : 0);
}

}  // namespace

std::vector<std::string> settle_overrides(
    Config& config,
    const std::set<std::string>& overridden) {
  std::vector<std::string> notes;
  const auto given = [&](const std::string& name) {
    return overridden.contains(name);
  };
  for (bool again = true; std::exchange(again, false);) {
    for (const UnusedKey& unused : find_unused(config)) {
      const std::string name = unused.key->full_name();
      if (!given(unused.chooser) || given(name)) {
        continue;
      }
      const ConfigField field = unused.key->field(config);
      notes.push_back(fmt::format(
          "{} = {} is not used, since --set {}={}",
          name,
          value_text(field),
          unused.chooser,
          unused.value));
      set_to_default(config, *unused.key);
      again = true;
    }
  }
  std::int64_t& warmup = config.lr_scheduler.warmup_steps;
  if (given("training.steps") && !given("lr_scheduler.warmup_steps") &&
      warmup > longest_warmup(config)) {
    const std::int64_t most = std::max<std::int64_t>(0, longest_warmup(config));
    notes.push_back(fmt::format(
        "lr_scheduler.warmup_steps = {} instead of {}, since --set "
        "training.steps={}",
        most,
        std::exchange(warmup, most),
        config.training.steps));
  }
  std::int64_t& traced = config.profiling.step;
  if ((given("training.steps") || given("profiling.enabled")) &&
      !given("profiling.step") && config.profiling.enabled &&
      traced > config.training.steps) {
    notes.push_back(fmt::format(
        "profiling.step = {} instead of {}, since there are no more "
        "training.steps",
        config.training.steps,
        std::exchange(traced, config.training.steps)));
  }
  std::string& nonfinite = config.training.on_nonfinite;
  if (given("checkpoint.interval") && !given("training.on_nonfinite") &&
      config.checkpoint.interval == 0 && nonfinite == "rewind") {
    nonfinite = "stop";
    notes.emplace_back(
        "training.on_nonfinite = \"stop\" instead of \"rewind\", since --set "
        "checkpoint.interval=0 leaves nothing to rewind to");
  }
  return notes;
}

}  // namespace flatshard
