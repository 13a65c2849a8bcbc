#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "flatshard/device/capability.h"
#include "flatshard/float8/quantize.h"

namespace flatshard::float8 {

/// A plane [outer, inner] in a matmul that sums over inner: a row plane, or a
/// transposed column plane.
struct Operand {
  Plane plane;
  Recipe recipe = Recipe::tensorwise;
};

/// A weight as one of its matmuls reads it.
struct WeightOperand {
  Operand operand;       ///< fprop: [out, in]; dgrad: [in, out]
  bool emulate = false;  ///< MatmulOptions::emulate
};

/// Returns the feature that a GPU needs for FP8 matmuls of this recipe.
GpuFeature feature_of(Recipe recipe);

struct MatmulOptions {
  /// Adds to out (beta 1) instead of overwriting it.
  bool accumulate = false;
  /// out = addend + matmul in one pass; [m, n] of out's dtype, not with
  /// accumulate.
  at::Tensor addend;
  /// Tensor cores keep fewer bits of sums; for matmuls of the forward.
  /// tensorwise and rowwise only, no effect on the others and on the CPU.
  bool fast_accumulation = false;
  /// On a GPU that does not multiply the recipe (`multiplies`) planes are
  /// decoded to bfloat16 and multiplied so. Decoding is exact where scales are
  /// powers of two (rowwise, mxfp8), else each value is rounded once, by at
  /// most 2^-9 of it. No faster than bfloat16.
  bool emulate = false;
};

/// out[m, n] = sum over k of a[m, k] * b[n, k], with both operands' scales;
/// sums in float32. The result may be rounded to a bfloat16 out's dtype before
/// it is added there.
///
/// | matmul         | a [m, k]               | b [n, k]                |
/// |----------------|------------------------|-------------------------|
/// | y = x w^T      | x, rows                | w, rows                 |
/// | dx = dy w      | dy, rows               | w, columns              |
/// | dw = dy^T x    | dy, columns            | x, columns              |
///
/// Recipes of a and b: tensorwise with tensorwise, rowwise with rowwise,
/// blockwise_1x128 with itself or blockwise, mxfp8 with mxfp8; e4m3 with either
/// format. On CUDA by cuBLASLt: k and n divisible by 16 (blocks of 128: k by
/// 128), any m. The fastest of its algorithms is found at the first call of a
/// shape, where the host waits. In a graph's recording and with torch's
/// deterministic algorithms it is the heuristic's first one.
///
/// @param out  [m, n] float32 or bfloat16, rows contiguous.
/// @throws Error{config} that names an unsupported argument.
/// Queues on the current stream.
void matmul(
    at::Tensor& out,
    const Operand& a,
    const Operand& b,
    const MatmulOptions& options = {});

/// Returns whether the GPU multiplies this recipe in FP8, by the table of
/// device/capability.h and, where that leaves it open, by cuBLASLt's answer.
/// False for the CPU, where matmuls are emulated.
bool multiplies(Recipe recipe, at::Device device);
/// Returns the text of errors: which GPU this is, and which ones multiply the
/// recipe in FP8.
std::string why_not_multiplied(Recipe recipe, at::Device device);

}  // namespace flatshard::float8
