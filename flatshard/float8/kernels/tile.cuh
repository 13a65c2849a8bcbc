#pragma once

#include "flatshard/float8/kernels/codec.cuh"

// A tile of 128 x 128 values from any source: a thread has 8 rows of 8 columns,
// a warp 16 rows of 128.
namespace flatshard::float8::kernels {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kTile = 128;

/// A source returns eight values of a row: `load` starts the loads, `finish`
/// computes the values, so that loads of several rows are in flight before the
template <class T>
struct MemorySource {
  using Value = T;
  using Loaded = Eight<T>;
  static constexpr int kRowsAtOnce = 8;  ///< a thread's loads under way
  /// Blocks that share a multiprocessor, as registers allow.
  static constexpr int blocks(Recipe recipe) {
    const bool few = recipe == Recipe::rowwise || recipe == Recipe::mxfp8;
    return sizeof(T) != 2 ? 2 : few ? 3 : 4;
  }
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

/// Returns whether eight-value loads from rows of `columns` may be wide.
template <class T>
bool wide_rows(const T* x, std::int64_t columns) {
  return aligned16(x) && columns % 8 == 0;
}

/// Returns the tile that a block has in a row of tiles. A source may choose
/// another order, so that data shared by adjacent blocks is read from memory
/// once.
template <class Source>
__device__ inline int tile_of_block(const Source& source) {
  if constexpr (requires { source.tile_of_block(); }) {
    return source.tile_of_block();
  } else {
    return static_cast<int>(blockIdx.x);
  }
}

/// The place of this thread in its tile.
struct TilePlace {
  __device__ explicit TilePlace(int tile) : TilePlace(tile, blockIdx.y) {}
  template <class Source>
  __device__ explicit TilePlace(const Source& source)
      : TilePlace(tile_of_block(source)) {}
  __device__ TilePlace(int tile, unsigned band) : tile(tile), band(band) {}

  /// Serves a pass before another one over the same tiles: from the last rows
  /// on, so that the other one finds in the cache what this one has read last.
  template <class Source>
  __device__ static TilePlace from_the_end(const Source& source) {
    return {tile_of_block(source), gridDim.y - 1 - blockIdx.y};
  }

  int tile;                      ///< of those side by side
  unsigned band;                 ///< of rows
  int group = threadIdx.x % 16;  ///< of 8 columns
  int row = threadIdx.x / 16 * 8;
  int warp = threadIdx.x / 32;
  std::int64_t r = std::int64_t{band} * kTile + row;
  std::int64_t c = std::int64_t{tile} * kTile + group * 8;
};

/// A thread's eight rows, AtOnce loads in flight: finish(i, load(i)).
template <int AtOnce, class Load, class Finish>
__device__ inline void for_rows(Load load, Finish finish) {
#pragma unroll
  for (int i = 0; i < 8; i += AtOnce) {
    decltype(load(0)) loaded[AtOnce];
#pragma unroll
    for (int k = 0; k < AtOnce; ++k) {
      loaded[k] = load(i + k);
    }
#pragma unroll
    for (int k = 0; k < AtOnce; ++k) {
      finish(i + k, loaded[k]);
    }
  }
}

template <class Source>
__device__ inline void load_tile(
    const Source& source,
    const TilePlace& at,
    Eight<typename Source::Value> (&v)[8]) {
  for_rows<Source::kRowsAtOnce>(
      [&](int i) { return source.load(at.r + i, at.c); },
      [&](int i, const auto& loaded) {
        v[i] = source.finish(loaded, at.r + i, at.c);
      });
}

/// Largest magnitudes of all values of a thread.
template <class T>
__device__ inline Peaks<T> thread_peaks(const Eight<T> (&v)[8]) {
  Peaks<T> found = peaks_of(v[0]);
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    found.merge(peaks_of(v[i]).w);
  }
  return found;
}

/// Largest magnitudes of the columns of each warp's 16 rows.
struct ColumnPeaks {
  alignas(16) std::uint32_t w[kTileWarps][kTile];

  /// Each thread brings its 8 columns. Ends with the block's barrier.
  template <class T>
  __device__ void gather(const Eight<T> (&v)[8], const TilePlace& at) {
    Peaks<T> found = thread_peaks(v);
#pragma unroll
    for (int k = 0; k < Peaks<T>::kWords; ++k) {
      found.w[k] = Peaks<T>::larger_word(
          found.w[k],
          __shfl_xor_sync(0xffffffffU, found.w[k], 16));
      if (threadIdx.x % 32 < 16) {
        w[at.warp][at.group * Peaks<T>::kWords + k] = found.w[k];
      }
    }
    __syncthreads();
  }

  /// Returns the peaks of a thread's 8 columns in Warps warps from its own on.
  template <int Warps, class T>
  __device__ Peaks<T> take(const TilePlace& at) const {
    const int first = at.warp / Warps * Warps;
    Peaks<T> found = {};
#pragma unroll
    for (int i = 0; i < Warps; ++i) {
      std::uint32_t words[Peaks<T>::kWords];
#pragma unroll
      for (int k = 0; k < Peaks<T>::kWords; ++k) {
        words[k] = w[first + i][at.group * Peaks<T>::kWords + k];
      }
      found.merge(words);
    }
    return found;
  }
};

struct TileScratch {
  ColumnPeaks columns;
  std::uint32_t block[32];
  /// The transpose: 128 rows of 16 words of 8 bytes.
  alignas(16) uint2 bytes[kTile][kTile / 8];
};

}  // namespace flatshard::float8::kernels
