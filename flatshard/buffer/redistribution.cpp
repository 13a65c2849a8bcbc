#include "flatshard/buffer/redistribution.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "flatshard/comm/tensor_memory.h"

namespace flatshard {
namespace {

using Kind = TransitionStep::Kind;

void copy_unless_same(const at::Tensor& to, const at::Tensor& from) {
  if (!same_memory(to, from)) {
    to.copy_(from);
  }
}

// Returns the segments of a rank's tensor.
std::vector<at::Tensor> parts(
    const at::Tensor& tensor,
    const std::vector<LocalRange>& ranges) {
  if (ranges.size() == 1) {
    return {tensor};
  }
  std::vector<at::Tensor> result;
  for (const LocalRange& range : ranges) {
    result.push_back(tensor.narrow(0, range.local_offset, range.numel));
  }
  return result;
}

// Returns the parts of `whole`, one of each segment, for a rank with the ranges
// `inner`.
std::vector<at::Tensor> matching_parts(
    const at::Tensor& whole,
    const std::vector<LocalRange>& outer,
    const std::vector<LocalRange>& inner) {
  std::vector<at::Tensor> result;
  for (std::size_t s = 0; s < inner.size(); ++s) {
    result.push_back(whole.narrow(
        0,
        outer[s].local_offset + inner[s].offset - outer[s].offset,
        inner[s].numel));
  }
  return result;
}

}  // namespace

Redistribution::Redistribution(
    std::shared_ptr<const FlatLayout> layout,
    std::shared_ptr<Mesh> mesh,
    Placements from,
    const Placements& to,
    Purpose purpose)
    : layout_(std::move(layout)), mesh_(std::move(mesh)) {
  for (TransitionStep& change : plan_transition(from, to)) {
    Step step{.after = local_part_at(change.after)};
    if (flatshard::communicates(change.kind)) {
      step.group = &mesh_->communicator(change.axes, purpose);
    }
    step.change = std::move(change);
    steps_.push_back(std::move(step));
  }
  from_ = local_part_at(from);
  // Until the local size stays, steps need memory in between.
  first_final_ = steps_.empty() ? 0 : steps_.size() - 1;
  while (first_final_ > 0 && keeps_size(steps_[first_final_].change.kind)) {
    --first_final_;
  }
}

Redistribution::LocalPart Redistribution::local_part_at(
    const Placements& placements) const {
  const auto sizes = mesh_->axis_sizes();
  return {
      local_numel(*layout_, placements, sizes),
      local_ranges(*layout_, placements, sizes, mesh_->coordinates())};
}

bool Redistribution::communicates() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& step) {
    return step.group != nullptr;
  });
}

void Redistribution::add_groups(std::vector<Communicator*>& groups) const {
  for (const Step& step : steps_) {
    if (step.group != nullptr) {
      groups.push_back(step.group);
    }
  }
}

bool Redistribution::is_identity() const {
  return from_numel() == to_numel() &&
         std::all_of(steps_.begin(), steps_.end(), [](const Step& step) {
           return step.group == nullptr || step.group->size() == 1;
         });
}

void Redistribution::run(const at::Tensor& in, const at::Tensor& out) const {
  const at::NoGradGuard no_grad;
  if (steps_.empty()) {
    copy_unless_same(out, in);
    return;
  }
  at::Tensor now = in;
  const LocalPart* before = &from_;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    const at::Tensor target =
        i < first_final_ ? at::empty({step.after.numel}, in.options()) : out;
    run_step(step, *before, now, target);
    now = target;
    before = &step.after;
  }
}

at::Tensor Redistribution::run(const at::Tensor& in) const {
  if (!communicates() && from_numel() == to_numel()) {
    return in;
  }
  const at::Tensor out = at::empty({to_numel()}, in.options());
  run(in, out);
  return out;
}

void Redistribution::run_step(
    const Step& step,
    const LocalPart& before,
    const at::Tensor& in,
    const at::Tensor& out) const {
  switch (step.change.kind) {
    case Kind::reduce_scatter:
      step.group->reduce_scatter(
          parts(out, step.after.ranges),
          parts(in, before.ranges),
          step.change.op);
      break;
    case Kind::all_gather:
      step.group->all_gather(
          parts(out, step.after.ranges),
          parts(in, before.ranges));
      break;
    case Kind::all_reduce:
      copy_unless_same(out, in);
      step.group->all_reduce(out, step.change.op);
      break;
    case Kind::relabel:
      copy_unless_same(out, in);
      break;
    case Kind::slice: {
      const auto sources = matching_parts(in, before.ranges, step.after.ranges);
      const auto targets = parts(out, step.after.ranges);
      for (std::size_t s = 0; s < targets.size(); ++s) {
        copy_unless_same(targets[s], sources[s]);
      }
      break;
    }
  }
}

}  // namespace flatshard
