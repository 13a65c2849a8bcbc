#pragma once

#include "flatshard/float8/kernels/tile_planes.cuh"

#include "flatshard/core/rounding.h"

// Kernels over all tiles of a source: rows and columns of values that are in
// memory, or are computed from such values.
namespace flatshard::float8::kernels {

/// Stores both planes of a tile, and its scales.
template <Recipe R, Format F, class T>
__device__ inline void quantize_tile(
    const Eight<T> (&v)[8],
    const TilePlace& at,
    std::int64_t rows,
    std::int64_t columns,
    const Quantize& a,
    TileScratch& scratch) {
  const bool transposed = a.column.row_stride == 1 && a.column.data != nullptr;
  if constexpr (R == Recipe::tensorwise || R == Recipe::blockwise) {
    // One factor for the tile, and both planes have it.
    std::uint32_t amax = 0;
    if constexpr (R == Recipe::tensorwise) {
      const PlanePointers& p = a.row.data != nullptr ? a.row : a.column;
      amax = magnitude(*p.amax);
    } else {
      amax = block_max(thread_peaks(v).largest(), scratch.block);
    }
    const bool first =
        R == Recipe::blockwise || (at.tile == 0 && blockIdx.y == 0);
    float factor = 0.0F;
    for (const PlanePointers* p : {&a.row, &a.column}) {
      if (p->data != nullptr) {
        factor = take_scale<R>(
            *p,
            blockIdx.y * p->scale_row_stride + at.tile * p->scale_column_stride,
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

template <class Source, Recipe R, Format F>
__global__ void __launch_bounds__(kTileThreads, Source::blocks(R))
    quantize_tiles_kernel(const Source source, const Quantize a) {
  __shared__ TileScratch scratch;
  const TilePlace at(source);
  Eight<typename Source::Value> v[8];
  load_tile(source, at, v);
  quantize_tile<R, F>(v, at, source.rows, source.columns, a, scratch);
}

/// A source of two halves side by side that are computed from the same values.
template <class Source>
concept HasHalves = requires(const Source& source) {
  source.whole_halves();
};

/// A block has a tile of each half.
template <class Source, Recipe R, Format F>
__global__ void __launch_bounds__(kTileThreads, Source::kBlocksOfHalves)
    quantize_halves_kernel(const Source source, const Quantize a) {
  __shared__ TileScratch scratch;
  const TilePlace left(static_cast<int>(blockIdx.x));
  const TilePlace right(static_cast<int>(blockIdx.x + gridDim.x));
  Eight<typename Source::Value> v[8];
  Eight<typename Source::Value> w[8];
  constexpr int kAtOnce = 2;  // as registers allow
  for_rows<kAtOnce>(
      [&](int i) { return source.load_halves(left.r + i, left.c); },
      [&](int i, const auto& loaded) {
        source.finish_halves(loaded, v[i], w[i]);
      });
  quantize_tile<R, F>(v, left, source.rows, source.columns, a, scratch);
  __syncthreads();
  quantize_tile<R, F>(w, right, source.rows, source.columns, a, scratch);
}

template <class Source>
__global__ void __launch_bounds__(kTileThreads)
    source_amax_kernel(const Source source, float* amax) {
  __shared__ std::uint32_t scratch[32];
  const TilePlace at = TilePlace::from_the_end(source);
  Eight<typename Source::Value> v[8];
  load_tile(source, at, v);
  const std::uint32_t found = block_max(thread_peaks(v).largest(), scratch);
  if (threadIdx.x == 0) {
    atomic_amax(amax, found);
  }
}

template <class Source>
__global__ void __launch_bounds__(kTileThreads) row_and_column_amax_kernel(
    const Source source,
    float* row_amax,
    float* column_amax) {
  __shared__ ColumnPeaks scratch;
  const TilePlace at = TilePlace::from_the_end(source);
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
    scratch.gather(v, at);
    if (threadIdx.x < 16) {
      const auto found =
          scratch.template take<kTileWarps, typename Source::Value>(at);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (at.c + j < source.columns) {
          atomic_amax(column_amax + at.c + j, found[j]);
        }
      }
    }
  }
}

inline dim3 tile_grid(std::int64_t rows, std::int64_t columns) {
  return {
      static_cast<unsigned>(ceil_div(columns, kTile)),
      static_cast<unsigned>(ceil_div(rows, kTile))};
}

/// Returns whether a source is quantized with a recipe, by its own choice;
/// kernels of others are not compiled.
template <class Source>
constexpr bool quantized_with(Recipe recipe) {
  if constexpr (requires { Source::quantized_with(recipe); }) {
    return Source::quantized_with(recipe);
  } else {
    return true;
  }
}

/// Picks the kernel of a recipe for a source that is quantized with it.
template <Format F, class Source>
void quantize_source(
    const Source& source,
    const Quantize& a,
    cudaStream_t stream) {
  const dim3 grid = tile_grid(source.rows, source.columns);
  const auto run = [&]<Recipe R>() {
    if constexpr (quantized_with<Source>(R)) {
      if constexpr (HasHalves<Source>) {
        if (source.whole_halves()) {
          quantize_halves_kernel<Source, R, F>
              <<<dim3(grid.x / 2, grid.y), kTileThreads, 0, stream>>>(
                  source,
                  a);
          return;
        }
      }
      quantize_tiles_kernel<Source, R, F>
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

/// amax = max(amax, the source's largest magnitude).
template <class Source>
void source_amax(const Source& source, float* amax, cudaStream_t stream) {
  source_amax_kernel<<<
      tile_grid(source.rows, source.columns),
      kTileThreads,
      0,
      stream>>>(source, amax);
}

/// The same for each row and each column; either may be null.
template <class Source>
void source_row_and_column_amax(
    const Source& source,
    float* rows,
    float* columns,
    cudaStream_t stream) {
  row_and_column_amax_kernel<<<
      tile_grid(source.rows, source.columns),
      kTileThreads,
      0,
      stream>>>(source, rows, columns);
}

}  // namespace flatshard::float8::kernels
