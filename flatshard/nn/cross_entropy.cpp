#include "flatshard/nn/cross_entropy.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace flatshard::nn {
namespace {

// The rows whose float32 logits exist at a time when no fused kernel applies.
constexpr std::int64_t kFloatRows = 512;

// cuda::cross_entropy in ATen, for the CPU and for other dtypes.
void cross_entropy_rows(
    at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& scale,
    at::Tensor& loss,
    at::Tensor& lse,
    const cuda::CrossEntropyArgs& args) {
  const at::Tensor valid = targets.ne(args.ignore_index);
  // In a part of the vocabulary, only tokens whose target is in it count.
  const at::Tensor known =
      args.is_part ? targets.ge(0).logical_and_(targets.lt(logits.size(1)))
                   : valid;
  const at::Tensor index =
      targets.masked_fill(known.logical_not(), 0).unsqueeze(1);
  const at::Tensor values = logits.to(at::kFloat);
  const at::Tensor weight = valid.to(at::kFloat);
  if (!args.lse_is_given) {
    lse.copy_(values.logsumexp(-1));
    const at::Tensor at_target = values.gather(1, index).squeeze(1);
    loss.copy_(
        args.is_part ? at_target.masked_fill(known.logical_not(), 0)
                     : (lse - at_target).mul_(weight));
  }
  if (args.write_gradient) {
    at::Tensor p = (values - lse.unsqueeze(1)).exp_();
    p.scatter_add_(1, index, known.to(at::kFloat).neg_().unsqueeze(1));
    logits.copy_(p.mul_((weight * scale).unsqueeze(1)));
  }
}

// Caps logits in place.
// Returns the slopes to multiply their gradient by, undefined without a cap or
// if the caller does not need them.
at::Tensor cap_in_place(at::Tensor& logits, double cap, bool wants_slope) {
  if (cap <= 0.0) {
    return {};
  }
  logits.div_(cap).tanh_();
  at::Tensor slope = wants_slope ? 1.0 - logits.square() : at::Tensor();
  logits.mul_(cap);
  return slope;
}

// Markers for targets that are not an index of this part of the vocabulary.
struct TargetMarks {
  explicit TargetMarks(std::int64_t ignore_index)
      : elsewhere(ignore_index == -1 ? -3 : -1),
        unknown(ignore_index == -2 ? -3 : -2) {}
  std::int64_t elsewhere;  ///< in another part
  std::int64_t unknown;    ///< in none
};

}  // namespace

void chunk_cross_entropy(
    at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& scale,
    at::Tensor& loss,
    at::Tensor& lse,
    const cuda::CrossEntropyArgs& args,
    double soft_cap) {
  if (soft_cap > 0.0) {
    const at::Tensor slope =
        cap_in_place(logits, soft_cap, args.write_gradient);
    chunk_cross_entropy(logits, targets, scale, loss, lse, args, 0.0);
    if (slope.defined()) {
      logits.mul_(slope);
    }
    return;
  }
  if (cuda::supports(logits)) {
    cuda::cross_entropy(logits, targets, scale, loss, lse, args);
    return;
  }
  for (std::int64_t at = 0; at < logits.size(0); at += kFloatRows) {
    const std::int64_t n = std::min(kFloatRows, logits.size(0) - at);
    at::Tensor logits_part = logits.narrow(0, at, n);
    at::Tensor lse_part = lse.narrow(0, at, n);
    at::Tensor loss_part =
        loss.defined() ? loss.narrow(0, at, n) : at::Tensor();
    cross_entropy_rows(
        logits_part,
        targets.narrow(0, at, n),
        scale,
        loss_part,
        lse_part,
        args);
  }
}

at::Tensor targets_of_part(
    const at::Tensor& targets,
    const LossOptions& options) {
  const IndexPart part = part_of(options.ranks, options.vocab);
  const TargetMarks marks(options.ignore_index);
  const auto outside = [&](std::int64_t begin, std::int64_t end) {
    return targets.lt(begin).logical_or_(targets.ge(end));
  };
  return (targets - part.begin)
      .masked_fill_(outside(part.begin, part.end), marks.elsewhere)
      .masked_fill_(outside(0, options.vocab), marks.unknown)
      .masked_fill_(targets.eq(options.ignore_index), options.ignore_index);
}

void part_cross_entropy(
    at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& scale,
    at::Tensor& loss,
    at::Tensor& lse,
    const cuda::CrossEntropyArgs& args,
    const LossOptions& options) {
  const at::Tensor slope =
      cap_in_place(logits, options.soft_cap, args.write_gradient);
  at::Tensor own = at::empty({1, 2, logits.size(0)}, lse.options());
  at::Tensor own_lse = own[0][0];
  at::Tensor own_target = own[0][1];
  chunk_cross_entropy(
      logits,
      targets,
      scale,
      own_target,
      own_lse,
      {.ignore_index = args.ignore_index, .is_part = true},
      0.0);
  const at::Tensor all = options.ranks->all_gather(own);
  lse.copy_(all.select(1, 0).logsumexp(0));
  at::Tensor target = all[0][1].clone();
  for (int r = 1; r < options.ranks->size(); ++r) {
    target.add_(all[r][1]);
  }
  loss.copy_((lse - target)
                 .masked_fill_(targets.eq(args.ignore_index), 0)
                 .masked_fill_(
                     targets.eq(TargetMarks(args.ignore_index).unknown),
                     NAN));
  if (!args.write_gradient) {
    return;
  }
  at::Tensor no_loss;
  chunk_cross_entropy(
      logits,
      targets,
      scale,
      no_loss,
      lse,
      {.ignore_index = args.ignore_index,
       .lse_is_given = true,
       .write_gradient = true,
       .is_part = true},
      0.0);
  if (slope.defined()) {
    logits.mul_(slope);
  }
}

}  // namespace flatshard::nn
