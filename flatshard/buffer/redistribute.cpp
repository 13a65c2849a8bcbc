#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/comm/tensor_memory.h"
#include "flatshard/core/error.h"

namespace flatshard {

void FlatBuffer::check_out(const Placements& to, const FlatBuffer& out) const {
  FLATSHARD_CHECK(
      out.defined(),
      usage,
      "redistribute from {} to {}: expected `out` with memory, got an empty "
      "one",
      flatshard::to_string(placements_),
      flatshard::to_string(to));
  const auto refuse =
      [&](const char* what, const auto& expected, const auto& got) {
        FLATSHARD_THROW(
            usage,
            "redistribute from {} to {}: expected `out` with {} {}, got {}",
            flatshard::to_string(placements_),
            flatshard::to_string(to),
            what,
            expected,
            got);
      };
  if (out.placements_ != to) {
    refuse(
        "placements",
        flatshard::to_string(to),
        flatshard::to_string(out.placements_));
  }
  if (!mesh_->same_as(*out.mesh_)) {
    refuse(
        "the source's mesh",
        mesh_->to_string(),
        mesh_->to_string() == out.mesh_->to_string()
            ? "another mesh of that shape"
            : out.mesh_->to_string());
  }
  if (layout_ != out.layout_) {
    refuse(
        "the source's layout of numel",
        layout_->numel(),
        fmt::format("another layout of numel {}", out.layout_->numel()));
  }
  if (dtype() != out.dtype()) {
    refuse("dtype", c10::toString(dtype()), c10::toString(out.dtype()));
  }
  if (device() != out.device()) {
    refuse("device", device().str(), out.device().str());
  }
  FLATSHARD_CHECK(
      !overlap(local_, out.local_) || may_share_memory(to, out),
      usage,
      "redistribute from {} to {}: `out` must not overlap the source's memory "
      "in this way; give it separate memory",
      flatshard::to_string(placements_),
      flatshard::to_string(to));
}

bool FlatBuffer::may_share_memory(const Placements& to, const FlatBuffer& out)
    const {
  using Kind = TransitionStep::Kind;
  const auto steps = plan_transition(placements_, to);
  const auto all_are = [&](auto&& predicate) {
    return std::all_of(
        steps.begin(),
        steps.end(),
        [&](const TransitionStep& step) { return predicate(step.kind); });
  };
  if (all_are(keeps_size)) {
    return same_memory(local_, out.local_);
  }
  // One side is its own slice of the other.
  if (all_are([](Kind kind) { return kind == Kind::slice; })) {
    const auto slice = slice_view(out.ranges_);
    return slice && same_memory(*slice, out.local_);
  }
  if (!all_are([](Kind kind) { return kind != Kind::reduce_scatter; })) {
    return false;
  }
  const auto slice = out.slice_view(ranges_);
  return slice && same_memory(*slice, local_);
}

FlatBuffer FlatBuffer::redistribute(
    const Placements& to,
    Purpose purpose,
    const FlatBuffer* out) const {
  FLATSHARD_CHECK(
      defined(),
      usage,
      "redistribute: expected a buffer, got an empty one");
  const Redistribution change(layout_, mesh_, placements_, to, purpose);
  const at::NoGradGuard no_grad;
  FlatBuffer result;
  if (out != nullptr) {
    check_out(to, *out);
    result = *out;
  } else {
    result = make_result(to, !change.communicates());
  }
  change.run(local_, result.local_);
  return result;
}

FlatBuffer FlatBuffer::make_result(const Placements& to, bool may_share) const {
  if (may_share && local_numel(*layout_, *mesh_, to) == local_.numel()) {
    return wrap(local_, layout_, mesh_, to);
  }
  const std::int64_t numel = local_numel(*layout_, *mesh_, to);
  FlatBuffer result =
      wrap(at::empty({numel}, local_.options()), layout_, mesh_, to);
  if (may_share) {
    if (const auto slice = slice_view(result.ranges_)) {
      result.local_ = *slice;
    }
  }
  return result;
}

}  // namespace flatshard
