#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace flatshard {

// Tensors over memory that graphs read and write at the same address in every
// replay.

/// `memory` as its user sees it: another tensor that keeps all three alive,
/// where `other` has the same memory.
at::Tensor hand_out(
    const at::Tensor& memory,
    std::shared_ptr<void> use,
    at::Tensor other = {});

/// Returns whether a copy from `a` to `b` keeps shape, layout and dtype.
bool same_kind(const at::Tensor& a, const at::Tensor& b);

/// Returns the part of `tensor` that is all of its memory: an element that
/// `expand` repeats is written once.
at::Tensor without_repeats(at::Tensor tensor);

}  // namespace flatshard
