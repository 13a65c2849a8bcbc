#pragma once

#include "flatshard/float8/kernels/codec.cuh"

// Tiles of 128 x 128 values, whatever they come from: a thread holds 8 rows of
// 8 columns, a warp 16 rows of 128.
namespace flatshard::float8::kernels {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kTile = 128;

/// A source gives eight values of a row: `load` begins it, `finish` makes them
/// of it, so that a thread's loads are all under way before the first is used.
template <class T>
struct MemorySource {
  using Value = T;
  using Loaded = Eight<T>;
  const T* x;
  std::int64_t rows;
  std::int64_t columns;
  bool wide;

  __device__ Loaded load(std::int64_t r, std::int64_t c) const {
    return load_eight<T>(x, r * columns + c, r < rows ? columns - c : 0, wide);
  }
  __device__ Eight<T> finish(const Loaded& v, std::int64_t, std::int64_t)
      const {
    return v;
  }
};

/// Whether eight-value loads from rows of `columns` may be wide.
template <class T>
bool wide_rows(const T* x, std::int64_t columns) {
  return aligned16(x) && columns % 8 == 0;
}

/// The place of this thread in its tile.
struct TilePlace {
  int group = threadIdx.x % 16;  ///< of 8 columns
  int row = threadIdx.x / 16 * 8;
  int warp = threadIdx.x / 32;
  std::int64_t r = std::int64_t{blockIdx.y} * kTile + row;
  std::int64_t c = std::int64_t{blockIdx.x} * kTile + group * 8;
};

template <class Source>
__device__ inline void load_tile(
    const Source& source,
    const TilePlace& at,
    Eight<typename Source::Value> (&v)[8]) {
  typename Source::Loaded loaded[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    loaded[i] = source.load(at.r + i, at.c);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = source.finish(loaded[i], at.r + i, at.c);
  }
}

/// Largest magnitudes of the columns of 16 rows, in all lanes.
template <class T>
__device__ inline void column_max(
    const Eight<T> (&v)[8],
    std::uint32_t (&found)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    found[j] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      found[j] = larger(found[j], magnitude(v[i][j]));
    }
    found[j] = larger(found[j], __shfl_xor_sync(0xffffffffU, found[j], 16));
  }
}

struct TileScratch {
  alignas(16) std::uint32_t columns[kTileWarps][kTile];
  std::uint32_t block[32];
  /// The transpose: 128 rows of 16 words of 8 bytes.
  alignas(16) uint2 bytes[kTile][kTile / 8];
};

/// A scale to multiply by, and one more for whoever stores it.
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
    const Scale scale = scale_of<R>(amax, format, rounding);
    if (stores) {
      scales[at] = scale.dequantize;
    }
    return scale.quantize;
  }
}

/// What the rows of the row plane are multiplied by.
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
      stores = stores && blockIdx.x == 0;
    } else {
      amax = lanes_max<kLanes>(largest_of(v[i]));
    }
    const std::int64_t scale =
        inside ? r * p.scale_row_stride + block * p.scale_column_stride : 0;
    factors[i] = take_scale<R>(p, scale, amax, stores, F, a.rounding);
  }
}

/// What the columns of the column plane are multiplied by.
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
  std::uint32_t amax[8] = {};
  constexpr int kWarps = R == Recipe::mxfp8 ? 2 : kTileWarps;
  if constexpr (R != Recipe::rowwise) {
    column_max(v, amax);
    if (threadIdx.x % 32 < 16) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        scratch.columns[at.warp][at.group * 8 + j] = amax[j];
      }
    }
    __syncthreads();
    const int first = at.warp / kWarps * kWarps;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        amax[j] = larger(amax[j], scratch.columns[first + w][at.group * 8 + j]);
      }
    }
  }
  const std::int64_t block = R == Recipe::rowwise ? 0 : at.r / (kWarps * 16);
  const bool first_rows =
      at.row % (kWarps * 16) == 0 && (R != Recipe::rowwise || blockIdx.y == 0);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const std::int64_t c = at.c + j;
    const bool inside = at.r < rows && c < columns;
    if constexpr (R == Recipe::rowwise) {
      amax[j] = c < columns ? magnitude(p.amax[c]) : 0;
    }
    const std::int64_t scale =
        inside ? block * p.scale_row_stride + c * p.scale_column_stride : 0;
    factors[j] =
        take_scale<R>(p, scale, amax[j], inside && first_rows, F, a.rounding);
  }
}

/// Eight codes to neighbouring bytes, of which `num` are there.
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

/// Stores a plane as the tensor lies; factor(i, j) is that of row i, column j.
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
    const std::int64_t c = std::int64_t{blockIdx.x} * kTile + column;
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

template <class Source, Recipe R, Format F>
__global__ void __launch_bounds__(kTileThreads)
    quantize_tiles_kernel(const Source source, const Quantize a) {
  __shared__ TileScratch scratch;
  const TilePlace at;
  const std::int64_t rows = source.rows;
  const std::int64_t columns = source.columns;
  Eight<typename Source::Value> v[8];
  load_tile(source, at, v);
  const bool transposed = a.column.row_stride == 1 && a.column.data != nullptr;
  if constexpr (R == Recipe::tensorwise || R == Recipe::blockwise) {
    // One factor for the tile, and both planes have it.
    std::uint32_t amax = 0;
    if constexpr (R == Recipe::tensorwise) {
      const PlanePointers& p = a.row.data != nullptr ? a.row : a.column;
      amax = magnitude(*p.amax);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        amax = larger(amax, largest_of(v[i]));
      }
      amax = block_max(amax, scratch.block);
    }
    const bool first =
        R == Recipe::blockwise || (blockIdx.x == 0 && blockIdx.y == 0);
    float factor = 0.0F;
    for (const PlanePointers* p : {&a.row, &a.column}) {
      if (p->data != nullptr) {
        factor = take_scale<R>(
            *p,
            blockIdx.y * p->scale_row_stride +
                blockIdx.x * p->scale_column_stride,
            amax,
            first && threadIdx.x == 0,
            F,
            a.rounding);
      }
    }
    const auto all = [=](int, int) { return factor; };
    if (a.row.data != nullptr) {
      store_lying<F>(v, a.row, at, rows, columns, all);
    }
    if (transposed) {
      store_transposed<F>(v, a, at, rows, columns, scratch, all);
    } else if (a.column.data != nullptr) {
      store_lying<F>(v, a.column, at, rows, columns, all);
    }
  } else {
    float factors[8];
    if (a.row.data != nullptr) {
      row_factors<R, F>(v, a, at, rows, columns, factors);
      store_lying<F>(v, a.row, at, rows, columns, [&](int i, int) {
        return factors[i];
      });
    }
    if (a.column.data != nullptr) {
      column_factors<R, F>(v, a, at, rows, columns, scratch, factors);
      const auto of_column = [&](int, int j) { return factors[j]; };
      if (transposed) {
        store_transposed<F>(v, a, at, rows, columns, scratch, of_column);
      } else {
        store_lying<F>(v, a.column, at, rows, columns, of_column);
      }
    }
  }
}

template <class Source>
__global__ void __launch_bounds__(kTileThreads) row_and_column_amax_kernel(
    const Source source,
    float* row_amax,
    float* column_amax) {
  __shared__ std::uint32_t scratch[kTileWarps][kTile];
  const TilePlace at;
  Eight<typename Source::Value> v[8];
  load_tile(source, at, v);
  if (row_amax != nullptr) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t found = lanes_max<16>(largest_of(v[i]));
      if (at.group == 0 && at.r + i < source.rows) {
        atomic_amax(row_amax + at.r + i, found);
      }
    }
  }
  if (column_amax != nullptr) {
    std::uint32_t found[8];
    column_max(v, found);
    if (threadIdx.x % 32 < 16) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        scratch[at.warp][at.group * 8 + j] = found[j];
      }
    }
    __syncthreads();
    const int column = threadIdx.x;
    const std::int64_t c = std::int64_t{blockIdx.x} * kTile + column;
    if (column < kTile && c < source.columns) {
      std::uint32_t largest = 0;
#pragma unroll
      for (int w = 0; w < kTileWarps; ++w) {
        largest = larger(largest, scratch[w][column]);
      }
      atomic_amax(column_amax + c, largest);
    }
  }
}

inline dim3 tile_grid(std::int64_t rows, std::int64_t columns) {
  return {
      static_cast<unsigned>(divide_up(columns, kTile)),
      static_cast<unsigned>(divide_up(rows, kTile))};
}

/// Picks the kernel of a recipe and a format for a source.
template <class Source>
void quantize_source(
    const Source& source,
    const Quantize& a,
    cudaStream_t stream) {
  const dim3 grid = tile_grid(source.rows, source.columns);
  const auto run = [&]<Recipe R>() {
    if (a.format == Format::e4m3) {
      quantize_tiles_kernel<Source, R, Format::e4m3>
          <<<grid, kTileThreads, 0, stream>>>(source, a);
    } else {
      quantize_tiles_kernel<Source, R, Format::e5m2>
          <<<grid, kTileThreads, 0, stream>>>(source, a);
    }
  };
  switch (a.recipe) {
    case Recipe::tensorwise:
      return run.template operator()<Recipe::tensorwise>();
    case Recipe::rowwise:
      return run.template operator()<Recipe::rowwise>();
    case Recipe::blockwise:
      return run.template operator()<Recipe::blockwise>();
    case Recipe::blockwise_1x128:
      return run.template operator()<Recipe::blockwise_1x128>();
    case Recipe::mxfp8:
      return run.template operator()<Recipe::mxfp8>();
  }
}

}  // namespace flatshard::float8::kernels
