#include "flatshard/checkpoint/changed_elements_kernels.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/pack.cuh"
#include "flatshard/device/with_float_dtype.cuh"

#include <cstring>
#include <type_traits>

namespace flatshard::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTilesPerBlock = kThreads / 32;
constexpr int kVector = 4;  // neighbors of one lane
constexpr int kRow = 32 * kVector;
constexpr int kRows = kTileElements / kRow;

template <class T>
using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;

// Returns the bits of `v` as at::Tensor::to converts it.
template <class Copy, class Now>
__device__ Bits<Copy> converted(Now v) {
  Bits<Copy> bits;
  if constexpr (std::is_same_v<Copy, Now>) {
    std::memcpy(&bits, &v, sizeof bits);  // NaN keeps its bits
  } else {
    const Copy copy = from_float<Copy>(to_float(v));
    std::memcpy(&bits, &copy, sizeof bits);
  }
  return bits;
}

__device__ std::int64_t tile_of_warp() {
  return static_cast<std::int64_t>(blockIdx.x) * kTilesPerBlock +
         threadIdx.x / 32;
}

__device__ uint4 row_of_marks(const std::uint32_t* marks, std::int64_t row) {
  return reinterpret_cast<const uint4*>(marks)[row];
}

// A lane's part of a row.
struct Changes {
  unsigned mine;  // bit i: the lane's element i
  int before;     // changes of the row before the lane's elements
};
__device__ Changes changes_of(const uint4& row, int lane) {
  const unsigned below = (1U << lane) - 1;
  return {
      (row.x >> lane & 1U) | (row.y >> lane & 1U) << 1 |
          (row.z >> lane & 1U) << 2 | (row.w >> lane & 1U) << 3,
      __popc(row.x & below) + __popc(row.y & below) + __popc(row.z & below) +
          __popc(row.w & below)};
}

// Moves N neighbors at a time. Elements from `end` on are not touched.
template <int N, bool kFull, class T>
__device__ void load_elements(
    const T* from,
    std::int64_t at,
    std::int64_t end,
    T (&to)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; i += N) {
    if (kFull || at + i < end) {
      const auto pack = *reinterpret_cast<const Pack<T, N>*>(from + at + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        to[i + k] = pack.v[k];
      }
    }
  }
}

template <class Now, class Copy, int N, bool kFull>
__device__ void
compare_tile(const CompareElements& args, std::int64_t tile, int lane) {
  const auto* const from = static_cast<const Now*>(args.now);
  auto* const copy = static_cast<Bits<Copy>*>(args.copy);
  auto* const values =
      static_cast<Bits<Copy>*>(args.values) + tile * kTileStored;
  std::uint16_t* const offsets = args.offsets + tile * kTileStored;
  const std::int64_t begin = tile * kTileElements + lane * kVector;
  Now now[kRows][kVector];
  Bits<Copy> old[kRows][kVector];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    load_elements<N, kFull>(from, begin + r * kRow, args.numel, now[r]);
    load_elements<N, kFull>(copy, begin + r * kRow, args.numel, old[r]);
  }
  int count = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t at = begin + r * kRow;
    Pack<Bits<Copy>, kVector> fresh;
    bool differs[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      fresh.v[i] = converted<Copy>(now[r][i]);
      differs[i] = (kFull || at + i < args.numel) && fresh.v[i] != old[r][i];
    }
    if (kFull && N == kVector) {
      if (differs[0] || differs[1] || differs[2] || differs[3]) {
        *reinterpret_cast<Pack<Bits<Copy>, kVector>*>(copy + at) = fresh;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (differs[i]) {
          copy[at + i] = fresh.v[i];
        }
      }
    }
    uint4 row{
        __ballot_sync(~0U, differs[0]),
        __ballot_sync(~0U, differs[1]),
        __ballot_sync(~0U, differs[2]),
        __ballot_sync(~0U, differs[3])};
    const std::int64_t index = tile * kRows + r;
    if (args.adds) {
      const uint4 earlier = row_of_marks(args.marks, index);
      row.x |= earlier.x;
      row.y |= earlier.y;
      row.z |= earlier.z;
      row.w |= earlier.w;
    }
    const Changes changes = changes_of(row, lane);
    int n = count + changes.before;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const bool changed = (changes.mine >> i & 1U) != 0;
      if (changed && n < kTileStored) {
        values[n] = fresh.v[i];
        offsets[n] = static_cast<std::uint16_t>(r * kRow + lane * kVector + i);
      }
      n += changed ? 1 : 0;
    }
    count = __shfl_sync(~0U, n, 31);
    __syncwarp();  // all lanes have read the marks
    if (lane == 0) {
      reinterpret_cast<uint4*>(args.marks)[index] = row;
    }
  }
  if (lane == 0) {
    args.counts[tile] = count;
  }
}

template <class Now, class Copy, int N>
__global__ void __launch_bounds__(kThreads)
    compare_kernel(CompareElements args) {
  const std::int64_t tile = tile_of_warp();
  const std::int64_t begin = tile * kTileElements;
  const int lane = threadIdx.x % 32;
  if (begin + kTileElements <= args.numel) {
    compare_tile<Now, Copy, N, true>(args, tile, lane);
  } else if (begin < args.numel) {
    compare_tile<Now, Copy, 1, false>(args, tile, lane);
  }
}

__global__ void count_kernel(
    const std::uint32_t* marks,
    const std::int64_t* ends,
    const std::int64_t* borders,
    std::int64_t* num_before,
    std::int64_t num_borders) {
  const std::int64_t i =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_borders) {
    return;
  }
  const std::int64_t tile = borders[i] / kTileElements;
  std::int64_t num = tile == 0 ? 0 : ends[tile - 1];
  // Nothing follows a border at the end of the last tile.
  int left = static_cast<int>(borders[i] % kTileElements);
  for (std::int64_t row = tile * kRows; left > 0; ++row, left -= kRow) {
    // The elements of a row before a border in lane `lane`, element `rest`.
    const uint4 words = row_of_marks(marks, row);
    const int lane = left / kVector;
    if (lane >= 32) {
      num +=
          __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
    } else {
      const auto [mine, before] = changes_of(words, lane);
      num += before + __popc(mine & ((1U << left % kVector) - 1));
    }
  }
  num_before[i] = num;
}

template <class T, class Index>
__global__ void __launch_bounds__(kThreads) list_kernel(ListElements args) {
  const std::int64_t tile = args.begin / kTileElements + tile_of_warp();
  if (tile * kTileElements >= args.end) {
    return;
  }
  const std::int64_t first = tile == 0 ? 0 : args.ends[tile - 1];
  const int count = static_cast<int>(args.ends[tile] - first);
  const int lane = threadIdx.x % 32;
  const auto write = [&](int n, int offset, T value) {
    const std::int64_t element = tile * kTileElements + offset;
    if (element >= args.begin && element < args.end) {
      const std::int64_t at = first + n - args.num_before;
      static_cast<Index*>(args.out_indices)[at] =
          static_cast<Index>(element + args.shift);
      static_cast<T*>(args.out_values)[at] = value;
    }
  };
  if (count <= kTileStored) {
    const auto* const values =
        static_cast<const T*>(args.values) + tile * kTileStored;
    const std::uint16_t* const offsets = args.offsets + tile * kTileStored;
    for (int n = lane; n < count; n += 32) {
      write(n, offsets[n], values[n]);
    }
    return;
  }
  const T* const copy = static_cast<const T*>(args.copy) + tile * kTileElements;
  int num = 0;
  for (int r = 0; r < kRows; ++r) {
    const Changes changes =
        changes_of(row_of_marks(args.marks, tile * kRows + r), lane);
    int n = num + changes.before;
    for (int i = 0; i < kVector; ++i) {
      if ((changes.mine >> i & 1U) != 0) {
        const int offset = r * kRow + lane * kVector + i;
        write(n++, offset, copy[offset]);
      }
    }
    num = __shfl_sync(~0U, n, 31);
  }
}

unsigned blocks_for(std::int64_t tiles) {
  return static_cast<unsigned>(ceil_div<std::int64_t>(tiles, kTilesPerBlock));
}

template <class Now, class Copy>
void compare(const CompareElements& args, cudaStream_t stream) {
  const bool wide = aligned16(args.now) && aligned16(args.copy);
  const auto kernel =
      wide ? compare_kernel<Now, Copy, kVector> : compare_kernel<Now, Copy, 1>;
  kernel<<<
      blocks_for(ceil_div<std::int64_t>(args.numel, kTileElements)),
      kThreads,
      0,
      stream>>>(args);
}

}  // namespace

void compare_elements(const CompareElements& args, cudaStream_t stream) {
  if (args.numel == 0) {
    return;
  }
  with_dtype(args.now_dtype, [&]<class Now>(Now) {
    with_dtype(args.copy_dtype, [&]<class Copy>(Copy) {
      compare<Now, Copy>(args, stream);
    });
  });
}

void count_elements(
    const std::uint32_t* marks,
    const std::int64_t* ends,
    const std::int64_t* borders,
    std::int64_t* num_before,
    std::int64_t num_borders,
    cudaStream_t stream) {
  if (num_borders > 0) {
    const auto blocks =
        static_cast<unsigned>(ceil_div<std::int64_t>(num_borders, kThreads));
    count_kernel<<<blocks, kThreads, 0, stream>>>(
        marks,
        ends,
        borders,
        num_before,
        num_borders);
  }
}

void list_elements(const ListElements& args, cudaStream_t stream) {
  const unsigned blocks = blocks_for(
      ceil_div<std::int64_t>(args.end, kTileElements) -
      args.begin / kTileElements);
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, stream>>>(args);
  };
  if (args.nbytes == 2) {
    launch(
        args.wide ? list_kernel<std::uint16_t, std::int64_t>
                  : list_kernel<std::uint16_t, std::int32_t>);
  } else {
    launch(
        args.wide ? list_kernel<std::uint32_t, std::int64_t>
                  : list_kernel<std::uint32_t, std::int32_t>);
  }
}

}  // namespace flatshard::kernels
