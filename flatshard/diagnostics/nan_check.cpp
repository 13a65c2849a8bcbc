#include "flatshard/diagnostics/nan_check.h"

#include "flatshard/group/frozen_float8.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <functional>
#include <vector>

namespace flatshard {
namespace {

// Returns whether all values are finite: one pass, nothing of the tensor's
// size.
at::Tensor has_bad_values(const at::Tensor& flat) {
  const auto [low, high] = at::aminmax(flat);
  return at::isfinite(low).logical_and(at::isfinite(high)).logical_not();
}

// Blocks the host once for all tensors.
bool any_bad(const std::vector<at::Tensor>& flats) {
  std::vector<at::Tensor> flags;
  for (const at::Tensor& flat : flats) {
    if (flat.numel() > 0) {
      flags.push_back(has_bad_values(flat).to(flats.front().device()));
    }
  }
  return !flags.empty() && at::stack(flags).any().item<bool>();
}

struct Suspect {
  std::string what;  ///< "weight", "gradient before its reduction", ...
  const GroupParameter* parameter = nullptr;
  std::int64_t begin = 0;  ///< offset of `values` in the parameter
  at::Tensor values;
  std::string where;  ///< rank, step, unit
};

// Throws when the values are not all finite.
void accuse(const Suspect& suspect) {
  const at::Tensor flat = suspect.values.flatten();
  if (flat.numel() == 0) {
    return;
  }
  const at::Tensor bad = at::isfinite(flat).logical_not();
  const auto count = bad.sum().item<std::int64_t>();
  if (count == 0) {
    return;
  }
  const auto first = bad.to(at::kByte).argmax().item<std::int64_t>();
  const GroupParameter& parameter = *suspect.parameter;
  const std::vector<std::int64_t> shape = parameter.whole_shape();
  const auto boxes = parameter.slice().boxes(
      parameter.shape,
      suspect.begin + first,
      suspect.begin + first + 1);
  throw Error(
      ErrorCode::usage,
      fmt::format(
          "{} of parameter {} is {} at flat element {} of shape [{}], the "
          "first of {} such elements; look at the data of this step, lower the "
          "learning rate, or compute in a wider dtype",
          suspect.what,
          parameter.names.front(),
          flat[first].item<double>(),
          FlatRuns(shape, boxes.front()).begin(0),
          fmt::join(shape, ", "),
          count),
      suspect.where);
}

std::string context(const Runtime& runtime, const Unit& unit) {
  return fmt::format(
      "rank {}/{} | step {} | unit {}",
      runtime.mesh()->rank(),
      runtime.mesh()->size(),
      runtime.executor().step(),
      unit.name());
}

void check_shards(
    const Runtime& runtime,
    const char* what,
    const std::function<at::Tensor(const ParamGroup&)>& flat_of) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flats;
  for (const auto& unit : runtime.units()) {
    for (const auto& group : unit->groups()) {
      if (const at::Tensor flat = flat_of(*group); flat.defined()) {
        flats.push_back(flat);
      }
    }
  }
  if (!any_bad(flats)) {
    return;
  }
  for (const auto& unit : runtime.units()) {
    for (const auto& group : unit->groups()) {
      const at::Tensor flat = flat_of(*group);
      if (!flat.defined()) {
        continue;
      }
      std::size_t index = 0;
      for (const NamedShard& shard : group->shards_of(flat)) {
        while (group->parameters()[index].names != shard.names) {
          ++index;
        }
        accuse(
            {.what = what,
             .parameter = &group->parameters()[index],
             .begin = shard.begin,
             .values = shard.tensor,
             .where = context(runtime, *unit)});
      }
    }
  }
}

}  // namespace

std::shared_ptr<NanCheck> NanCheck::install(
    const std::shared_ptr<Runtime>& runtime) {
  auto check = std::make_shared<NanCheck>();
  runtime->add_observer(check);
  return check;
}

void NanCheck::gradients_ready(Unit& unit, const SlotView& slot) {
  if (!enabled_) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flats;
  for (std::size_t g = 0; g < unit.groups().size(); ++g) {
    if (unit.groups()[g]->trainable()) {
      flats.push_back(unit.gradients().flat(slot, g));
    }
  }
  if (!any_bad(flats)) {
    return;
  }
  for (const UnitParameter& p : unit.parameters()) {
    const ParamGroup& group = *unit.groups()[p.group];
    if (group.trainable()) {
      // The runtime adds rank, step, unit and "reduce" itself.
      accuse(
          {.what = "the gradient that this rank computed (before its "
                   "reduction)",
           .parameter = &group.parameters()[p.index],
           .values = unit.gradients().view(slot, p)});
    }
  }
}

void NanCheck::check_reduced_gradients(const Runtime& runtime) {
  check_shards(
      runtime,
      "this rank's shard of the reduced gradient",
      [](const ParamGroup& group) {
        return group.trainable() && group.gradients().reduced().exists()
                   ? group.gradients().reduced().local()
                   : at::Tensor();
      });
}

void NanCheck::check_weights(const Runtime& runtime) {
  check_shards(
      runtime,
      "this rank's shard of the weight",
      [](const ParamGroup& group) {
        return has_main_weights(group) ? group.weights().main().local()
                                       : at::Tensor();
      });
}

}  // namespace flatshard
