#include "flatshard/runtime/strict_checks.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {

StrictChecks::StrictChecks(std::vector<std::string> unit_names)
    : names_(std::move(unit_names)), ran_(names_.size(), false) {
}

void StrictChecks::forward_begin(UnitId unit) {
  ran_[unit] = true;
}

void StrictChecks::expect_backward(UnitId unit, CallId call) {
  waiting_.emplace(call, unit);
}

void StrictChecks::backward_begin(CallId call) {
  waiting_.erase(call);
}

void StrictChecks::reset() {
  waiting_.clear();
}

void StrictChecks::module_called(
    UnitId unit,
    const std::string& module,
    bool runs) const {
  FLATSHARD_CHECK(
      runs,
      usage,
      "module {} was called, but its weights belong to unit {}, whose forward "
      "is not running, so they are not gathered; call the unit through its "
      "holder (`block(x)`, not `block->forward(x)` or one of its submodules), "
      "or make {} a unit of its own (FullyShardOptions::units)",
      module,
      name(unit),
      module);
}

void StrictChecks::parameter_done(UnitId unit, const std::string& parameter)
    const {
  FLATSHARD_CHECK(
      ran_[unit],
      usage,
      "parameter {} got a gradient, but its unit {} had no forward since the "
      "weights changed: the forward ran without the unit's hooks, or the "
      "parameter was used outside of it; call the unit through its holder "
      "(`block(x)`, not `block->forward(x)`)",
      parameter,
      name(unit));
}

void StrictChecks::weights_changed() {
  std::fill(ran_.begin(), ran_.end(), false);
}

void StrictChecks::end_step() {
  if (waiting_.empty()) {
    return;
  }
  const UnitId unit = waiting_.begin()->second;
  const auto count = waiting_.size();
  waiting_.clear();
  FLATSHARD_THROW(
      usage,
      "{} forward(s) of module {} wanted a backward and got none before the "
      "end of the step, so weights stayed gathered for them; call backward "
      "before the optimizer step, or run the forward under at::NoGradGuard",
      count,
      name(unit));
}

void compare_next(
    Mesh& mesh,
    UnitId next,
    const std::vector<std::string>& names,
    std::int64_t step) {
  if (mesh.size() == 1) {
    return;
  }
  const at::NoGradGuard no_grad;
  const auto options =
      at::TensorOptions().dtype(at::kLong).device(mesh.device());
  const at::Tensor all = at::empty({mesh.size()}, options);
  mesh.world(Purpose::reduce).all_gather(all, at::full({1}, next, options));
  const at::Tensor host = all.cpu();
  const auto said = host.accessor<std::int64_t, 1>();
  const auto text = [&](std::int64_t unit) {
    return unit == kNoUnit ? std::string("ended the step")
                           : "called module " + names[unit];
  };
  for (int rank = 1; rank < mesh.size(); ++rank) {
    FLATSHARD_CHECK(
        said[rank] == said[0],
        usage,
        "ranks ran their modules in different orders in step {}: rank 0 {}, "
        "rank {} {}; all ranks have to call the same units in the same order",
        step,
        text(said[0]),
        rank,
        text(said[rank]));
  }
}

}  // namespace flatshard
