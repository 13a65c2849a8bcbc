#pragma once

#include <cudaTypedefs.h>
#include <cuda_bf16.h>

#include "flatshard/device/cuda_driver.h"
#include "flatshard/moe/kernels/grouped_products.h"
#include "flatshard/moe/kernels/hopper.cuh"

// Kernels for other GPUs than sm_90a are empty.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177
#endif

// The common part of the kernels in grouped_*.cu: matmuls in tiles. The class
// of each kernel copies its operands, finds its tiles and writes them.
namespace flatshard::nn::kernels {
namespace {

// A block computes tiles of 256 columns, one after the other. One of its
// warpgroups copies, and two multiply 64 rows each: of one tile of 128 rows, or
// alternately of a tile each, so that one multiplies while the other one
// writes. The ring between them has stages, each with 64 terms of a tile's
// sums. The parts of an operand are boxes of 64 rows of 128 bytes. Such a row
// is either 64 terms of one row (or column) of the tile, or one term of 64 of
// them: `transposed`.
//
// Two blocks are a cluster. Their tiles have the same columns, or the same
// rows, so that one operand is the same. Each block copies half of it to both,
// and less is read from the level 2 cache.
constexpr int kWarpgroup = 128;
constexpr int kMultipliers = 2 * kWarpgroup;
constexpr int kThreads = kMultipliers + kWarpgroup;
constexpr int kTileColumns = kProductTile;
constexpr int kBox = 64;
constexpr int kRowNbytes = 128;
constexpr int kBoxNbytes = kBox * kRowNbytes;
constexpr int kColumnBoxes = kTileColumns / kBox;
constexpr int kPair = 2;              // blocks of a cluster
constexpr int kSwizzleNbytes = 1024;  // the alignment of a box
constexpr int kBarrierNbytes = 8;

// How the multiplying warpgroups divide their work.
enum class Warpgroups { share_tiles, alternate };

// The sizes of a kernel's tiles and ring.
template <Warpgroups kWarpgroups>
struct Sizes {
  static constexpr bool kTurns = kWarpgroups == Warpgroups::alternate;
  static constexpr int kRowBoxes = kTurns ? 1 : 2;
  static constexpr int kTileRows = kRowBoxes * kBox;
  static constexpr int kThreadsOfTile = kRowBoxes * kWarpgroup;
  static constexpr int kStageBoxes = kRowBoxes + kColumnBoxes;
  static constexpr int kStageNbytes = kStageBoxes * kBoxNbytes;
  static constexpr int kStages = kTurns ? 5 : 4;
  static constexpr int kSharedNbytes =
      kSwizzleNbytes + kStages * kStageNbytes + 2 * kStages * kBarrierNbytes;
};

// A place in the ring.
template <int kStages>
struct Place {
  int stage = 0;
  int parity = 0;  // of the number of earlier uses

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void advance(int stages) {
    const int at = stage + stages;
    stage = at % kStages;
    parity ^= at / kStages % 2;
  }
};

// The addresses of the parts of shared memory.
template <class Sizes>
struct SharedOf {
  static constexpr int kStages = Sizes::kStages;
  static constexpr int kStageNbytes = Sizes::kStageNbytes;
  std::uint8_t* memory;
  std::uint32_t address;

  __device__ explicit SharedOf(std::uint8_t* raw) {
    const std::uint32_t unaligned = hopper::address_of(raw);
    address =
        (unaligned + kSwizzleNbytes - 1) / kSwizzleNbytes * kSwizzleNbytes;
    memory = raw + (address - unaligned);
  }
  __device__ std::uint32_t a(int stage) const {
    return address + stage * kStageNbytes;
  }
  __device__ std::uint32_t b(int stage) const {
    return a(stage) + Sizes::kRowBoxes * kBoxNbytes;
  }
  // Copies have filled the stage.
  __device__ std::uint32_t filled(int stage) const {
    return address + kStages * kStageNbytes + stage * kBarrierNbytes;
  }
  // Its matmuls have ended in both blocks.
  __device__ std::uint32_t used(int stage) const {
    return filled(kStages + stage);
  }
};

// A tile of a result, next to the tile of the other block.
struct Tile {
  int expert;
  int row;     // the first
  int column;  // the first
  int begin;   // the expert's rows
  int end;
  bool same_rows;  // in both tiles; else they have the same columns
  bool exists;     // false: this block only copies for the other one
};

// @param is_same  The other block needs it, too.
template <bool kTransposed>
__device__ inline void copy_operand(
    std::uint32_t to,
    const CUtensorMap& matrix,
    int first,
    int term,
    int boxes,
    std::uint32_t filled,
    bool is_same) {
  const int rank = hopper::cluster_rank();
  for (int i = 0; i < boxes; ++i) {
    const int at = first + i * kBox;
    const int column = kTransposed ? at : term;
    const int row = kTransposed ? term : at;
    const std::uint32_t box = to + i * kBoxNbytes;
    if (!is_same) {
      hopper::copy_box(box, matrix, column, row, filled);
    } else if (i % kPair == rank) {
      hopper::copy_box_to((1 << kPair) - 1, box, matrix, column, row, filled);
    }
  }
}

// A multiplying thread has packs of four adjacent columns of the tile. Pairs of
// threads exchange sums for that.
constexpr int kPacks = 32;

// @param thread  of those that have the tile
__device__ inline int row_of_thread(int thread) {
  return thread / 32 * 16 + thread % 32 / 4;
}
__device__ inline int row_of_pack(int i) {
  return i % 2 * 8;
}
__device__ inline int thread_column() {
  return threadIdx.x % 2 * 8 + (threadIdx.x & 2) * 2;
}
__device__ inline int column_of_pack(int i) {
  return i / 2 * 16;
}

__device__ inline float4 pack_of(const float (&sums)[128], int i) {
  const bool is_odd = threadIdx.x % 2 == 1;
  const float* const left = sums + i / 2 * 8 + i % 2 * 2;
  const float* const right = left + 4;
  const float x = __shfl_xor_sync(~0U, is_odd ? left[0] : right[0], 1);
  const float y = __shfl_xor_sync(~0U, is_odd ? left[1] : right[1], 1);
  return is_odd ? float4{x, y, right[0], right[1]}
                : float4{left[0], left[1], x, y};
}

__device__ inline uint2 to_bfloat16(float4 v) {
  const __nv_bfloat162 pairs[] = {
      __floats2bfloat162_rn(v.x, v.y),
      __floats2bfloat162_rn(v.z, v.w)};
  return {
      reinterpret_cast<const unsigned&>(pairs[0]),
      reinterpret_cast<const unsigned&>(pairs[1])};
}

// The pairs of tiles of a pair of blocks are first_pair(), and each
// num_pairs()-th after it.
__device__ inline int first_pair() {
  return blockIdx.x / kPair;
}
__device__ inline int num_pairs() {
  return gridDim.x / kPair;
}

template <class Matmul>
__device__ inline void copy_tiles(
    const Matmul& matmul,
    const typename Matmul::Shared& shared) {
  typename Matmul::Tiles tiles(matmul.args);
  Tile tile;
  Place<Matmul::Size::kStages> place;
  for (int t = first_pair(); tiles.find(t, tile); t += num_pairs()) {
    const int stages = matmul.stages(tile);
    for (int step = 0; step < stages; ++step) {
      hopper::wait(shared.used(place.stage), place.parity ^ 1);
      matmul.copy(tile, step, shared, place.stage);
      place.advance();
    }
  }
}

// Queues the matmuls of a warpgroup for one stage.
//
// @param box  of the tile's rows
template <class Matmul>
__device__ inline void multiply_stage(
    float (&sums)[128],
    const typename Matmul::Shared& shared,
    int stage,
    int box,
    bool add) {
  constexpr int kTerms = 16;  // of a matmul
  hopper::begin_matmuls();
#pragma unroll
  for (int term = 0; term < kBox; term += kTerms) {
    const auto operand = [&](std::uint32_t part, bool transposed) {
      return hopper::operand(
          part + term * (transposed ? kRowNbytes : 2),
          kBoxNbytes);
    };
    hopper::matmul_64x256<Matmul::kTransposedA, Matmul::kTransposedB>(
        sums,
        operand(shared.a(stage) + box * kBoxNbytes, Matmul::kTransposedA),
        operand(shared.b(stage), Matmul::kTransposedB),
        add || term > 0);
  }
  hopper::end_matmuls();
}

// Lets two warpgroups multiply alternately. Warpgroup 0 is first.
class Turns {
 public:
  __device__ explicit Turns(int warpgroup) : warpgroup_(warpgroup) {
    if (warpgroup != 0) {
      pass();
    }
  }
  __device__ void wait() const {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_of(warpgroup_)),
                 "n"(kMultipliers)
                 : "memory");
  }
  __device__ void pass() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier_of(1 - warpgroup_)),
                 "n"(kMultipliers)
                 : "memory");
  }

 private:
  __device__ static int barrier_of(int warpgroup) { return 3 + warpgroup; }

  int warpgroup_;
};

template <class Matmul>
__device__ inline void multiply_tiles(
    const Matmul& matmul,
    const typename Matmul::Shared& shared,
    int warpgroup) {
  const auto release = [&](int stage) {
    const int thread = threadIdx.x % kWarpgroup;
    if (thread % 32 == 0 && thread / 32 < kPair) {
      hopper::arrive(shared.used(stage), thread / 32);
    }
  };
  constexpr bool kTurns = Matmul::Size::kTurns;
  const int box = kTurns ? 0 : warpgroup;
  int turn = 0;
  const Turns turns(kTurns ? warpgroup : 0);
  typename Matmul::Tiles tiles(matmul.args);
  Tile tile;
  Place<Matmul::Size::kStages> place;
  for (int t = first_pair(); tiles.find(t, tile); t += num_pairs()) {
    const int stages = matmul.stages(tile);
    if (kTurns) {
      if (turn++ % 2 != warpgroup) {
        place.advance(stages);
        continue;
      }
      turns.wait();
    }
    if constexpr (Matmul::kHasEmptyTiles) {
      if (stages == 0) {
        if (kTurns) {
          turns.pass();
        }
        matmul.write_empty(tile);
        continue;
      }
    }
    matmul.fetch(tile);
    const bool has_rows = tile.exists && box < matmul.row_boxes(tile);
    float sums[128];
    int previous = -1;
    for (int step = 0; step < stages; ++step) {
      hopper::wait(shared.filled(place.stage), place.parity);
      matmul.clean(tile, step, shared, place.stage);
      if (has_rows) {
        multiply_stage<Matmul>(sums, shared, place.stage, box, step > 0);
        hopper::wait_for_matmuls<1>();
      }
      if (previous >= 0) {
        release(previous);
      }
      previous = place.stage;
      place.advance();
    }
    if (kTurns) {
      turns.pass();
    }
    matmul.write(tile, sums, [&] {
      hopper::wait_for_matmuls<0>();
      release(previous);
    });
  }
}

// Older GPUs have no clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define FLATSHARD_PAIRS
#else
#define FLATSHARD_PAIRS __cluster_dims__(kPair, 1, 1)
#endif

template <class Matmul>
__global__ void FLATSHARD_PAIRS __launch_bounds__(kThreads, 1) matmul_kernel(
    const __grid_constant__ CUtensorMap a,
    const __grid_constant__ CUtensorMap b,
    const __grid_constant__ typename Matmul::Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ std::uint8_t raw[];
  const typename Matmul::Shared shared(raw);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Matmul::Size::kStages; ++stage) {
      hopper::init_barrier(shared.filled(stage), 1);
      hopper::init_barrier(shared.used(stage), kPair * Matmul::Size::kRowBoxes);
    }
    hopper::fence_barriers();
  }
  hopper::sync_cluster();
  const Matmul matmul{args, a, b};
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x % kWarpgroup == 0) {
      copy_tiles(matmul, shared);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_tiles(matmul, shared, warpgroup);
  }
  hopper::sync_cluster();  // the other block may write here until then
#endif
}

// Describes a bfloat16 matrix that is copied in boxes.
cudaError_t describe(
    CUtensorMap& map,
    const void* matrix,
    std::int64_t rows,
    std::int64_t columns) {
  static const auto encode = flatshard::detail::find_driver_function<
      PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  if (encode == nullptr) {
    return cudaErrorCallRequiresNewerDriver;
  }
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(columns),
      static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_nbytes[] = {sizes[0] * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {kBox, kBox};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = encode(
      &map,
      CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      2,
      const_cast<void*>(matrix),
      sizes,
      row_nbytes,
      box,
      steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Matmul>
cudaError_t launch_matmul(
    const CUtensorMap& a,
    const CUtensorMap& b,
    const typename Matmul::Args& args,
    cudaStream_t stream) {
  int device = 0;
  int processors = 0;
  for (const cudaError_t error :
       {cudaGetDevice(&device),
        cudaDeviceGetAttribute(
            &processors,
            cudaDevAttrMultiProcessorCount,
            device),
        cudaFuncSetAttribute(
            matmul_kernel<Matmul>,
            cudaFuncAttributeMaxDynamicSharedMemorySize,
            Matmul::Size::kSharedNbytes)}) {
    if (error != cudaSuccess) {
      return error;
    }
  }
  matmul_kernel<Matmul>
      <<<processors / kPair * kPair,
         kThreads,
         Matmul::Size::kSharedNbytes,
         stream>>>(a, b, args);
  return cudaGetLastError();
}

}  // namespace
}  // namespace flatshard::nn::kernels
