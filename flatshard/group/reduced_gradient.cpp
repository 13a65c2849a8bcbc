#include "flatshard/group/reduced_gradient.h"

#include <ATen/ATen.h>

#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/group/host_memory.h"

namespace flatshard {

bool ReducedGradient::exists() const {
  return owner_ == Owner::us || (owner_ == Owner::others && !given_->expired());
}

const FlatBuffer& ReducedGradient::buffer() const {
  check_owned();
  return reduced_;
}

void ReducedGradient::check_owned() const {
  FLATSHARD_CHECK(
      owner_ != Owner::others,
      internal,
      "the gradient of {} is others': take_back() comes first",
      context_.name);
}

FlatBuffer ReducedGradient::wrap(at::Tensor tensor) const {
  return tensor.defined() ? FlatBuffer::wrap(
                                std::move(tensor),
                                context_.plan.layout,
                                context_.mesh,
                                context_.strategy.optimizer)
                          : FlatBuffer();
}

void ReducedGradient::give_up() {
  if (owner_ != Owner::us || context_.options.offload) {
    return;
  }
  given_.emplace(reduced_.local().getIntrusivePtr());
  owner_ = Owner::others;
  reduced_ = {};
  in_reduce_dtype_ = {};
}

void ReducedGradient::take_back() {
  if (owner_ != Owner::others) {
    return;
  }
  auto memory = given_->lock();
  given_.reset();
  owner_ = memory ? Owner::us : Owner::none;
  if (memory) {
    reduced_ = wrap(at::Tensor(std::move(memory)));
  }
}

void ReducedGradient::drop() {
  owner_ = Owner::none;
  given_.reset();
  if (context_.options.offload && reduced_.defined()) {
    // Pinning it again is slower than a step.
    kept_host_memory_ = std::move(reduced_);
  }
  reduced_ = {};
  in_reduce_dtype_ = {};
}

ReducedGradient::Space ReducedGradient::make_space(bool is_last) {
  const ParamGroupOptions& options = context_.options;
  const Precision& precision = options.precision;
  check_owned();
  Space space{.add = owner_ == Owner::us};
  owner_ = Owner::us;
  space.widen =
      space.add && reduced_.local().scalar_type() != precision.main_grads;
  if (space.widen) {
    in_reduce_dtype_ = std::exchange(reduced_, {});
  }
  const Placements& at_rest = context_.strategy.optimizer;
  if (!options.offload) {
    const bool in_reduce_dtype =
        is_last && !space.add && options.grads_in_reduce_dtype;
    if (!reduced_.defined()) {
      reduced_ = FlatBuffer(
          context_.plan.layout,
          context_.mesh,
          at_rest,
          in_reduce_dtype ? precision.reduce : precision.main_grads);
    }
    return space;
  }
  if (kept_host_memory_.defined() &&
      kept_host_memory_.local().use_count() == 1) {  // no other owner
    reduced_ = std::exchange(kept_host_memory_, {});
  }
  if (!reduced_.defined()) {
    reduced_ = in_host_memory(context_, at_rest, precision.main_grads);
  }
  return space;
}

void ReducedGradient::widen() const {
  reduced_.local().copy_(in_reduce_dtype_.local());
}

void ReducedGradient::scale(double factor) {
  check_owned();
  if (owner_ == Owner::us) {
    // A copy only when it is in another dtype.
    reduced_ = wrap(reduced_.local().to(context_.options.precision.main_grads));
    reduced_.local().mul_(factor);
  }
}

ReducedGradient::Contents ReducedGradient::contents() const {
  check_owned();
  return {
      .reduced = reduced_.local(),
      .in_reduce_dtype = in_reduce_dtype_.local(),
      .exists = owner_ == Owner::us};
}

void ReducedGradient::put(const Contents& contents) {
  reduced_ = wrap(contents.reduced);
  in_reduce_dtype_ = wrap(contents.in_reduce_dtype);
  owner_ = contents.exists ? Owner::us : Owner::none;
}

std::int64_t ReducedGradient::nbytes() const {
  std::int64_t given = 0;
  if (owner_ == Owner::others) {
    if (const at::Tensor memory(given_->lock()); memory.defined()) {
      given = static_cast<std::int64_t>(memory.nbytes());
    }
  }
  return reduced_.nbytes() + in_reduce_dtype_.nbytes() + given;
}

}  // namespace flatshard
