#include "flatshard/group/param_group.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

void sum_or_set(const at::Tensor& into, const at::Tensor& from, bool add) {
  if (add) {
    into.add_(from);
  } else {
    into.copy_(from);
  }
}

}  // namespace

Placements ParamGroup::partial_everywhere() const {
  const ReduceOp op =
      options_.scaling == GradScaling::mean ? ReduceOp::avg : ReduceOp::sum;
  return Placements(mesh_->num_axes(), Placement::partial(op));
}

Placements ParamGroup::final_gradient() const {
  return options_.strategy.optimizer;  // Shard or Replicate, never Partial
}

ParamGroup::Reduction ParamGroup::plan_reduction(
    bool collective,
    bool is_last) {
  Reduction r{.collective = collective};
  r.add_local = has_local_;
  if (!collective) {
    has_local_ = true;
    allocate(local_, partial_everywhere(), options_.precision.main_grads);
    return r;
  }
  has_local_ = false;
  copied_ = false;  // every rank's gradient needed its copies
  const Placements& rest = options_.strategy.gradient;
  const bool has_partial =
      std::any_of(rest.begin(), rest.end(), [](const Placement& p) {
        return p.is_partial();
      });
  r.add_inner = has_inner_;
  r.to_inner = has_partial && !is_last;
  if (r.to_inner || r.add_inner) {
    allocate(inner_, options_.strategy.gradient, options_.precision.main_grads);
  }
  if (r.to_inner) {
    has_inner_ = true;
    return r;
  }
  has_inner_ = false;
  contributed_ = std::exchange(contributes_, false);
  check_not_lent();
  r.add_grad = has_grad_;
  has_grad_ = true;
  const Precision& precision = options_.precision;
  const bool narrow = is_last && !r.add_grad && can_stay_narrow();
  r.widen = r.add_grad && grad_.local().scalar_type() != precision.main_grads;
  if (r.widen) {
    narrow_ = std::exchange(grad_, {});
  }
  if (options_.offload && host_grad_.defined() &&
      host_grad_.local().use_count() == 1) {  // nobody kept the last step's
    grad_ = std::exchange(host_grad_, {});
  }
  allocate(
      grad_,
      final_gradient(),
      narrow ? precision.reduce : precision.main_grads,
      options_.offload);
  return r;
}

bool ParamGroup::can_stay_narrow() const {
  return options_.narrow_grads;
}

void ParamGroup::reduce(const at::Tensor& slot, const Reduction& r) {
  const at::ScalarType wire = options_.precision.reduce;
  if (options_.scaling == GradScaling::pre_scaled) {
    slot.mul_(1.0 / mesh_->size());
  }
  if (!r.collective) {
    sum_or_set(local_.local(), slot, r.add_local);
    return;
  }
  at::Tensor source = slot;
  if (r.add_local) {
    local_.local().add_(slot);
    source = local_.local().to(wire);
  }
  const bool by_inner = r.to_inner || r.add_inner;
  if (by_inner) {
    const at::Tensor inner = way(Way::to_inner).run(source);
    sum_or_set(inner_.local(), inner, r.add_inner);
    if (r.to_inner) {
      return;
    }
    source = inner_.local().to(wire);
  }
  const Redistribution& rest =
      way(by_inner ? Way::inner_to_final : Way::to_final);
  if (r.widen) {
    grad_.local().copy_(narrow_.local());
  }
  const double divisor = options_.grad_divisor;
  const bool direct = !options_.offload && !r.add_grad && !reduced_hook_ &&
                      wire == grad_.local().scalar_type();
  if (direct) {
    rest.run(source, grad_.local());
    if (divisor != 1) {
      grad_.local().div_(divisor);
    }
    return;
  }
  at::Tensor reduced = rest.run(source);
  if (reduced_hook_) {
    reduced_hook_(reduced);
  }
  if (divisor != 1) {
    // Widened first: what accumulates is not rounded once more.
    reduced = reduced.to(grad_.local().scalar_type()).div_(divisor);
  }
  if (options_.offload) {
    download_grad(reduced, r.add_grad);
  } else {
    sum_or_set(grad_.local(), reduced, r.add_grad);
  }
}

void ParamGroup::download_grad(const at::Tensor& reduced, bool add) {
  // Sums are made on the device, so that all of it is queued.
  at::Tensor sum = reduced.to(grad_.dtype());
  if (add) {
    sum = grad_.local().to(sum.device(), /*non_blocking=*/true).add_(sum);
  }
  grad_.local().copy_(sum, /*non_blocking=*/true);
}

void ParamGroup::zero_grad() {
  forget_grad();
  has_inner_ = false;
  has_local_ = false;
  contributes_ = false;
  inner_ = {};
  local_ = {};
}

void ParamGroup::forget_grad() {
  has_grad_ = false;
  lent_.reset();
  if (options_.offload && grad_.defined()) {
    host_grad_ = std::move(grad_);  // pinning it anew takes longer than a step
  }
  grad_ = {};
  narrow_ = {};
}

const FlatBuffer& ParamGroup::grad() const {
  check_not_lent();
  return grad_;
}

void ParamGroup::lend_grad() {
  if (!has_grad_ || lent_ || options_.offload) {
    return;
  }
  lent_.emplace(grad_.local().getIntrusivePtr());
  grad_ = {};
  narrow_ = {};
}

void ParamGroup::reclaim_grad() {
  if (!lent_) {
    return;
  }
  auto memory = lent_->lock();
  lent_.reset();
  if (!memory) {
    forget_grad();
    return;
  }
  grad_ = FlatBuffer::wrap(
      at::Tensor(std::move(memory)),
      layout_,
      mesh_,
      final_gradient());
}

void ParamGroup::check_not_lent() const {
  FLATSHARD_CHECK(
      !lent_,
      internal,
      "the gradient of {} is lent: reclaim_grad() comes first",
      options_.name);
}

void ParamGroup::scale_gradients(double factor) {
  const at::NoGradGuard no_grad;
  check_not_lent();
  if (has_grad_) {
    // A copy only when it is narrow.
    grad_ = FlatBuffer::wrap(
        grad_.local().to(options_.precision.main_grads),
        layout_,
        mesh_,
        final_gradient());
    grad_.local().mul_(factor);
  }
  if (has_inner_) {
    inner_.local().mul_(factor);
  }
  if (has_local_) {
    local_.local().mul_(factor);
  }
}

}  // namespace flatshard
