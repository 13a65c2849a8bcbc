#pragma once

#include <ATen/core/Tensor.h>

namespace flatshard::nn {

// The writer of a gradient can find its largest magnitude in the same pass. The
// layer that quantizes it runs next, as another node of autograd.

/// Notes that `amax` [] float32 is the largest magnitude of `gradient`. The
/// last few of a thread are remembered, none keeps a gradient's memory, and one
/// that was written since counts for nothing.
void note_amax(const at::Tensor& gradient, at::Tensor amax);

/// Returns the amax of the same values in the same memory, and forgets it.
/// Undefined if none was noted.
at::Tensor take_known_amax(const at::Tensor& gradient);

/// Forgets all of this thread: before and after a separate graph is recorded.
void forget_known_amax();

}  // namespace flatshard::nn
