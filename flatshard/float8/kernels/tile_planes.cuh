#pragma once

#include "flatshard/float8/kernels/tile.cuh"

// From the values of a tile to the scales and the bytes of its planes.
namespace flatshard::float8::kernels {

/// A scale to multiply by, and one more to store.
template <Recipe R>
__device__ inline float take_scale(
    const PlanePointers& p,
    std::int64_t at,
    std::uint32_t amax,
    bool stores,
    Format format,
    Rounding rounding) {
  if constexpr (R == Recipe::mxfp8) {
    auto* scales = static_cast<std::uint8_t*>(p.scales);
    const std::uint8_t code =
        p.given_scales ? scales[at] : e8m0_of(float_of(amax), format, rounding);
    if (stores && !p.given_scales) {
      scales[at] = code;
    }
    return scale_of_e8m0(code).quantize;
  } else {
    auto* scales = static_cast<float*>(p.scales);
    if (p.given_scales) {
      return 1.0F / scales[at];
    }
    const float quantize = quantizer<R>(amax, format, rounding);
    if (stores) {
      scales[at] = dequantizer_of(quantize);
    }
    return quantize;
  }
}

/// Finds the factors of the rows of the row plane.
template <Recipe R, Format F, class T>
__device__ inline void row_factors(
    const Eight<T> (&v)[8],
    const Quantize& a,
    const TilePlace& at,
    std::int64_t rows,
    std::int64_t columns,
    float (&factors)[8]) {
  const PlanePointers& p = a.row;
  constexpr int kLanes = R == Recipe::mxfp8 ? 4 : 16;
  const std::int64_t block = R == Recipe::rowwise ? 0 : at.c / (kLanes * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::int64_t r = at.r + i;
    const bool inside = r < rows && at.c < columns;
    std::uint32_t amax = 0;
    bool stores = inside && at.group % kLanes == 0;
    if constexpr (R == Recipe::rowwise) {
      amax = r < rows ? magnitude(p.amax[r]) : 0;
      stores = stores && at.tile == 0;
    } else {
      amax = lanes_max<kLanes>(largest_of(v[i]));
    }
    const std::int64_t scale =
        inside ? r * p.scale_row_stride + block * p.scale_column_stride : 0;
    factors[i] = take_scale<R>(p, scale, amax, stores, F, a.rounding);
  }
}

/// Finds the factors of the columns of the column plane.
template <Recipe R, Format F, class T>
__device__ inline void column_factors(
    const Eight<T> (&v)[8],
    const Quantize& a,
    const TilePlace& at,
    std::int64_t rows,
    std::int64_t columns,
    TileScratch& scratch,
    float (&factors)[8]) {
  const PlanePointers& p = a.column;
  constexpr int kWarps = R == Recipe::mxfp8 ? 2 : kTileWarps;
  Peaks<T> peaks = {};
  if constexpr (R != Recipe::rowwise) {
    scratch.columns.gather(v, at);
    peaks = scratch.columns.template take<kWarps, T>(at);
  }
  const std::int64_t block = R == Recipe::rowwise ? 0 : at.r / (kWarps * 16);
  const bool first_rows =
      at.row % (kWarps * 16) == 0 && (R != Recipe::rowwise || blockIdx.y == 0);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const std::int64_t c = at.c + j;
    const bool inside = at.r < rows && c < columns;
    std::uint32_t amax = peaks[j];
    if constexpr (R == Recipe::rowwise) {
      amax = c < columns ? magnitude(p.amax[c]) : 0;
    }
    const std::int64_t scale =
        inside ? block * p.scale_row_stride + c * p.scale_column_stride : 0;
    factors[j] =
        take_scale<R>(p, scale, amax, inside && first_rows, F, a.rounding);
  }
}

/// Stores eight codes to adjacent bytes; only `num` of them exist.
__device__ inline void
store_eight(std::uint8_t* to, uint2 codes, std::int64_t num, bool wide) {
  if (num >= 8 && wide) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
  for (int i = 0; i < 8 && i < num; ++i) {
    to[i] =
        static_cast<std::uint8_t>((i < 4 ? codes.x : codes.y) >> (i % 4 * 8));
  }
}

/// Stores a plane in the tensor's order; factor(i, j) belongs to row i, column
/// j.
template <Format F, class T, class Factor>
__device__ inline void store_lying(
    const Eight<T> (&v)[8],
    const PlanePointers& p,
    const TilePlace& at,
    std::int64_t rows,
    std::int64_t columns,
    Factor factor) {
  const bool wide = p.row_stride % 8 == 0 && aligned(p.data, 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (at.r + i >= rows) {
      break;
    }
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = v[i][j] * factor(i, j);
    }
    store_eight(
        p.data + (at.r + i) * p.row_stride + at.c,
        {encode4<F>(x[0], x[1], x[2], x[3]),
         encode4<F>(x[4], x[5], x[6], x[7])},
        columns - at.c,
        wide);
  }
}

/// Stores the transpose. Words of 8 bytes are permuted by their columns' group,
/// so that neither the writes nor the reads of 16 bytes meet in a bank.
template <Format F, class T, class Factor>
__device__ inline void store_transposed(
    const Eight<T> (&v)[8],
    const Quantize& a,
    const TilePlace& at,
    std::int64_t rows,
    std::int64_t columns,
    TileScratch& scratch,
    Factor factor) {
  const PlanePointers& p = a.column;
  // Beyond the tensor are zeros, also in a block with NaN.
  const std::int64_t valid = rows - at.r;
  const std::uint64_t keep = valid >= 8  ? ~std::uint64_t{0}
                             : valid > 0 ? (std::uint64_t{1} << 8 * valid) - 1
                                         : 0;
  const int word = at.row / 8 ^ at.group;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = v[i][j] * factor(i, j);
    }
    scratch.bytes[at.group * 8 + j][word] = {
        encode4<F>(x[0], x[1], x[2], x[3]) & static_cast<std::uint32_t>(keep),
        encode4<F>(x[4], x[5], x[6], x[7]) &
            static_cast<std::uint32_t>(keep >> 32)};
  }
  __syncthreads();
  const int chunk = threadIdx.x % 8;  // of 16 rows
  const std::int64_t r = std::int64_t{blockIdx.y} * kTile + chunk * 16;
  const bool wide = p.column_stride % 16 == 0 && aligned16(p.data);
#pragma unroll
  for (int pass = 0; pass < kTile / 32; ++pass) {
    const int column = pass * 32 + threadIdx.x / 8;
    const std::int64_t c = std::int64_t{at.tile} * kTile + column;
    if (c >= columns || r >= a.padded_rows) {
      continue;
    }
    const int group = column / 8;
    const uint4 pair = *reinterpret_cast<const uint4*>(
        &scratch.bytes[column][(chunk ^ group / 2) * 2]);
    const uint4 codes =
        group % 2 == 0 ? pair : uint4{pair.z, pair.w, pair.x, pair.y};
    std::uint8_t* to = p.data + c * p.column_stride + r;
    if (wide && r + 16 <= a.padded_rows) {
      *reinterpret_cast<uint4*>(to) = codes;
    } else {
      store_eight(to, {codes.x, codes.y}, a.padded_rows - r, false);
      store_eight(to + 8, {codes.z, codes.w}, a.padded_rows - r - 8, false);
    }
  }
}

}  // namespace flatshard::float8::kernels
