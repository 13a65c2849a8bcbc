#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard::float8::cuda {

/// One operand of a matmul in cuBLASLt's form.
struct Side {
  at::Tensor data;    ///< [outer, inner]
  at::Tensor scales;  ///< undefined for bfloat16
  std::int32_t mode = -1;
};

/// out = a b^T + beta c.
struct Product {
  Side a, b;  ///< a is out's rows: cuBLASLt's B, and b its A
  at::Tensor out;
  at::Tensor c;  ///< what beta multiplies; out when there is none
  float beta;
  bool fast = false;
  /// b is [inner, outer]: out = a b + beta c.
  bool by_columns = false;
  /// Uses the algorithm that cuBLASLt suggests first, so that all ranks use the
  /// same one.
  bool takes_first = false;
};

/// Runs a matmul on the current stream with cuBLASLt's fastest algorithm, found
/// at the first call of its kind.
/// @return false when it has none.
/// @throws Error{cuda}
bool run_product(const Product& product);

/// Returns whether cuBLASLt has FP8 matmuls with these scale modes on a GPU.
bool has_product(std::int32_t mode_a, std::int32_t mode_b, at::Device device);

}  // namespace flatshard::float8::cuda
