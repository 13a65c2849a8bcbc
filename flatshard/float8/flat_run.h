#pragma once

#include <cstdint>

namespace flatshard::float8 {

/// A run of a flat shard that is a part of one weight [rows, columns], and its
/// FP8 destination. Plain numbers for kernels. `begin`, `end`, `first` and
/// `columns` are multiples of 16, with mxfp8 of 32.
struct FlatRun {
  std::int64_t begin = 0;    ///< in the shard
  std::int64_t end = 0;      ///< the first element after it
  std::int64_t first = 0;    ///< of the weight, at `begin`
  std::int64_t columns = 0;  ///< of the weight

  // The place of largest magnitudes: block (r, c) of the weight has element
  // amax + r * amax_stride + c.
  std::int64_t block_rows = 0;  ///< 0: one for the entire weight
  std::int64_t block_columns = 0;
  std::int64_t amax = 0;
  std::int64_t amax_stride = 0;

  // mxfp8: the destination of the first byte, and of the first scale.
  std::int64_t data = 0;
  std::int64_t scales = 0;
};

}  // namespace flatshard::float8
