#include "flatshard/group/gradient_pipeline.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "flatshard/comm/sum_rows.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

// Adds the parts of a slot, or all of it if there are none.
void add_parts(
    const at::Tensor& into,
    const at::Tensor& slot,
    bool add,
    const std::vector<GradientPipeline::Reduction::Part>& parts) {
  if (parts.empty()) {
    add_scaled(into, slot, 1.0, add);
  }
  for (const auto& [range, adds] : parts) {
    add_scaled(
        into.narrow(0, range.offset, range.numel),
        slot.narrow(0, range.offset, range.numel),
        1.0,
        adds);
  }
}

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5;
}

}  // namespace

Placements GradientPipeline::placements_at(Stage stage) const {
  const Placement partial = Placement::partial(context_.division().op);
  switch (stage) {
    case Stage::unreduced:
      return Placements(context_.num_axes(), partial);
    case Stage::inner:
      return context_.strategy.gradient;
    case Stage::outside: {
      Placements placements = at_rest();
      placements.front() = partial;
      return placements;
    }
    case Stage::rest:
      break;
  }
  return at_rest();
}

const Placements& GradientPipeline::at_rest() const {
  return context_.strategy.optimizer;
}

void GradientPipeline::allocate(
    FlatBuffer& buffer,
    const Placements& placements,
    at::ScalarType dtype) const {
  if (!buffer.defined()) {
    buffer = FlatBuffer(context_.plan.layout, context_.mesh, placements, dtype);
  }
}

const Redistribution* GradientPipeline::redistribution(Stage from, Stage to) {
  const auto known = redistributions_.find({from, to});
  if (known != redistributions_.end()) {
    return &known->second;
  }
  Redistribution planned(
      context_.plan.layout,
      context_.mesh,
      placements_at(from),
      placements_at(to),
      Purpose::reduce);
  return &redistributions_.emplace(std::pair(from, to), std::move(planned))
              .first->second;
}

std::vector<Communicator*> GradientPipeline::Reduction::inner_groups() const {
  std::vector<Communicator*> groups;
  for (const Redistribution* way :
       {inner, outside, by_outer() ? nullptr : last}) {
    if (way != nullptr) {
      way->add_groups(groups);
    }
  }
  return groups;
}

std::vector<Communicator*> GradientPipeline::Reduction::outer_groups() const {
  std::vector<Communicator*> groups;
  if (by_outer()) {
    last->add_groups(groups);
  }
  return groups;
}

void GradientPipeline::replan() {
  redistributions_.clear();
}

std::optional<GradientPipeline::OpenSum>
GradientPipeline::open_sum(bool collective, bool is_last, bool may_allocate) {
  const ParamGroupOptions& options = context_.options;
  const at::ScalarType dtype = options.precision.main_grads;
  if (options.scaling == GradScaling::pre_scaled || dtype != at::kFloat) {
    return std::nullopt;
  }
  if (!collective || local_.is_filled) {
    opened_ = {collective, is_last};
    allocate(local_.buffer, placements_at(Stage::unreduced), dtype);
    return OpenSum{local_.buffer.local(), local_.is_filled};
  }
  const GradDivision division = context_.division();
  const bool is_only_added =
      !hook_ && !options.offload && !reduced_.is_given() &&
      division.before == 1 && division.on_wire == 1 && division.at_rest == 1 &&
      (is_last || !context_.plan.storage.sums_inner) && !inner_.is_filled &&
      !has_outer_stage() &&
      redistribution(Stage::unreduced, Stage::rest)->is_identity();
  if (!is_only_added || (!may_allocate && !reduced_.exists())) {
    return std::nullopt;
  }
  // Before space is made: without a reduction, an old sum has to stay.
  const bool new_in_reduce_dtype = is_last && options.grads_in_reduce_dtype;
  const at::ScalarType at_rest =
      reduced_.exists()     ? reduced_.local().scalar_type()
      : new_in_reduce_dtype ? options.precision.reduce
                            : dtype;
  if (at_rest != dtype) {
    return std::nullopt;
  }
  opened_ = {collective, is_last};
  if (!space_) {
    space_ = reduced_.make_space(is_last);
  }
  return OpenSum{reduced_.local(), space_->add};
}

void GradientPipeline::close_sum() {
  summed_.clear();
  summed_and_in_slot_.clear();
  opened_.reset();
  if (const auto space = std::exchange(space_, std::nullopt);
      space && !space->add) {
    reduced_.drop();
  }
}

std::vector<GradientPipeline::Reduction::Part> GradientPipeline::take_parts(
    bool add) {
  std::vector<Reduction::Part> parts;
  const std::vector<std::int64_t> summed = std::exchange(summed_, {});
  const std::vector<std::int64_t> both = std::exchange(summed_and_in_slot_, {});
  if (summed.empty() && both.empty()) {
    return parts;
  }
  const FlatLayout& layout = *context_.plan.layout;
  // The elements of each such parameter, by their offset.
  std::map<std::int64_t, std::pair<std::int64_t, bool>> ranges;
  for (const std::int64_t i : summed) {
    ranges[layout.tensor_offset(i)] = {layout.tensor_numel(i), false};
  }
  for (const std::int64_t i : both) {
    ranges[layout.tensor_offset(i)] = {layout.tensor_numel(i), true};
  }
  ranges[layout.numel()] = {0, false};
  std::int64_t at = 0;
  for (const auto& [offset, range] : ranges) {
    const auto& [numel, is_in_slot] = range;
    if (offset > at) {
      parts.push_back({{at, offset - at}, add});
    }
    if (is_in_slot) {
      parts.push_back({{offset, numel}, /*add=*/true});
    }
    at = offset + numel;
  }
  if (parts.empty()) {
    parts.push_back({});  // not the same as all of the slot
  }
  return parts;
}

GradientPipeline::Reduction GradientPipeline::plan(
    bool collective,
    bool is_last) {
  const ParamGroupOptions& options = context_.options;
  const Precision& precision = options.precision;
  const Opened opened = std::exchange(opened_, std::nullopt)
                            .value_or(Opened{collective, is_last});
  FLATSHARD_CHECK(
      (opened == Opened{collective, is_last}),
      internal,
      "{}: gradients were added to a sum, and another reduction follows",
      context_.name);
  Reduction r;
  r.adds.local = local_.is_filled;
  local_.is_filled = !collective;
  if (!collective) {
    allocate(
        local_.buffer,
        placements_at(Stage::unreduced),
        precision.main_grads);
    r.path = Path::local;
    r.parts = take_parts(r.adds.local);
    return r;
  }
  if (r.adds.local) {
    r.parts = take_parts(/*add=*/true);
  }
  const Placements& between = context_.strategy.gradient;
  r.adds.inner = inner_.is_filled;
  inner_.is_filled = context_.plan.storage.sums_inner && !is_last;
  Stage reached = Stage::unreduced;
  if (inner_.is_filled || r.adds.inner) {
    allocate(inner_.buffer, between, precision.main_grads);
    r.inner = redistribution(reached, Stage::inner);
    reached = Stage::inner;
  }
  if (inner_.is_filled) {
    r.path = Path::inner;
    return r;
  }
  if (has_outer_stage()) {
    const bool waits = r.adds.local || r.adds.inner;
    const bool alone = context_.plan.storage.outer == StoragePlan::Outer::alone;
    r.path = alone && !waits ? Path::outer_of_slot : Path::outer;
    if (!alone) {
      r.outside = redistribution(reached, Stage::outside);
    }
    reached = Stage::outside;
  }
  r.last = redistribution(reached, Stage::rest);
  for (std::int64_t i = 0; i < std::ssize(contributes_); ++i) {
    if (contributes_[i] != 0) {
      insert(contributed_, i);
    }
  }
  contributes_.clear();
  const ReducedGradient::Space space =
      space_ ? *std::exchange(space_, std::nullopt)
             : reduced_.make_space(is_last);
  r.adds.reduced = space.add;
  r.widen = space.widen;
  if (!r.adds.local) {
    r.parts = take_parts(space.add);
  }
  return r;
}

at::Tensor GradientPipeline::reduce_inner(
    const at::Tensor& slot,
    const Reduction& r) {
  const ParamGroupOptions& options = context_.options;
  const at::ScalarType wire = options.precision.reduce;
  if (options.scaling == GradScaling::pre_scaled) {
    slot.mul_(1.0 / context_.mesh->size());
  }
  if (r.path == Path::local) {
    add_parts(local_.buffer.local(), slot, r.adds.local, r.parts);
    return {};
  }
  const double before = context_.division().before;
  at::Tensor source = slot;
  if (r.adds.local) {
    const at::Tensor local = local_.buffer.local();
    add_parts(local, slot, /*add=*/true, r.parts);
    // A sum of microbatches: it may overflow float16.
    source = (before == 1 ? local : local.div_(before)).to(wire);
  } else if (before != 1) {
    slot.div_(before);
  }
  if (r.inner != nullptr) {
    const at::Tensor inner = r.inner->run(source);
    add_scaled(inner_.buffer.local(), inner, 1.0, r.adds.inner);
    if (r.path == Path::inner) {
      return {};
    }
    source = inner_.buffer.local().to(wire);
  }
  if (!r.by_outer()) {
    finish(source, r);
    return {};
  }
  return r.outside == nullptr ? source : r.outside->run(source);
}

void GradientPipeline::reduce_outer(
    const at::Tensor& inner,
    const Reduction& r) {
  if (inner.defined()) {
    finish(inner, r);
  }
}

void GradientPipeline::finish(const at::Tensor& source, const Reduction& r) {
  const ParamGroupOptions& options = context_.options;
  const GradDivision division = context_.division();
  if (r.widen) {
    reduced_.widen();
  }
  if (!r.adds.local && !r.parts.empty()) {
    add_parts(reduced_.local(), source, r.adds.reduced, r.parts);
    return;
  }
  const bool direct =
      !options.offload && !r.adds.reduced && !hook_ &&
      options.precision.reduce == reduced_.local().scalar_type();
  if (direct) {
    r.last->run(source, reduced_.local());
    if (const double divisor = division.on_wire * division.at_rest;
        divisor != 1) {
      reduced_.local().div_(divisor);
    }
    return;
  }
  // Read at once, so a single rank needs no copy of it. A hook may keep it.
  const at::Tensor reduced =
      r.last->is_identity() && !hook_ ? source : r.last->run(source);
  if (hook_) {
    hook_(reduced);
  }
  if (division.on_wire != 1) {
    reduced.div_(division.on_wire);  // of memory that is no longer read
  }
  add_to_reduced(reduced, r.adds.reduced);
}

void GradientPipeline::add_to_reduced(at::Tensor reduced, bool add) {
  const ParamGroupOptions& options = context_.options;
  const at::Tensor into = reduced_.local();
  const double divisor = context_.division().at_rest;
  if (divisor != 1 && !options.offload) {
    // Widened first: what accumulates is not rounded once more.
    if (into.scalar_type() == at::kFloat && is_power_of_two(divisor)) {
      add_scaled(into, reduced, 1.0 / divisor, add);  // bitwise identical
    } else if (!add) {
      into.copy_(reduced).div_(divisor);
    } else {
      into.add_(reduced.to(into.scalar_type()).div(divisor));
    }
    return;
  }
  if (divisor != 1) {
    reduced = reduced.to(into.scalar_type()).div(divisor);
  }
  if (!options.offload) {
    add_scaled(into, reduced, 1.0, add);
    return;
  }
  // Sums are made on the device, so that all of it is queued.
  at::Tensor sum = reduced.to(into.scalar_type());
  if (add) {
    sum = into.to(sum.device(), /*non_blocking=*/true).add_(sum);
  }
  into.copy_(sum, /*non_blocking=*/true);
}

void GradientPipeline::zero() {
  reduced_.drop();
  contributes_.clear();
  contributed_.clear();
  reduced_to_sum_.clear();
  local_ = {};
  inner_ = {};
  space_.reset();
  opened_.reset();
}

bool GradientPipeline::is_empty() const {
  return !reduced_.is_somebodys() && !has_unreduced() && contributes_.empty();
}

GradientPipeline::Contents GradientPipeline::take() {
  const ReducedGradient::Contents reduced = reduced_.contents();
  const Contents contents{
      .tensors =
          {local_.buffer.local(),
           inner_.buffer.local(),
           reduced.reduced,
           reduced.in_reduce_dtype},
      .local_is_filled = local_.is_filled,
      .inner_is_filled = inner_.is_filled,
      .has_reduced = reduced.exists,
      .contributed = contributed_};
  zero();
  return contents;
}

void GradientPipeline::put(const Contents& contents) {
  FLATSHARD_CHECK(
      is_empty(),
      internal,
      "{}: expected no gradient before the gradients of a graph",
      context_.name);
  const auto wrap = [&](const at::Tensor& tensor, const Placements& at) {
    return tensor.defined() ? FlatBuffer::wrap(
                                  tensor,
                                  context_.plan.layout,
                                  context_.mesh,
                                  at)
                            : FlatBuffer();
  };
  local_ = {
      wrap(contents.tensors[0], placements_at(Stage::unreduced)),
      contents.local_is_filled};
  inner_ = {
      wrap(contents.tensors[1], placements_at(Stage::inner)),
      contents.inner_is_filled};
  reduced_.put(
      {.reduced = contents.tensors[2],
       .in_reduce_dtype = contents.tensors[3],
       .exists = contents.has_reduced});
  contributed_ = contents.contributed;
}

void GradientPipeline::scale(double factor) {
  const at::NoGradGuard no_grad;
  reduced_.scale(factor);
  for (const Sum* sum : {&inner_, &local_}) {
    if (sum->is_filled) {
      sum->buffer.local().mul_(factor);
    }
  }
}

GradientPipeline::Bytes GradientPipeline::nbytes() const {
  return {
      .reduced = reduced_.nbytes(),
      .inner = inner_.buffer.nbytes(),
      .local = local_.buffer.nbytes()};
}

}  // namespace flatshard
