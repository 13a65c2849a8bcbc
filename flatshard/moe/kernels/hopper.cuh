#pragma once

#include <cuda.h>

#include <cstdint>

// Instructions of sm_90a: asynchronous copies of tiles (TMA), their barriers,
// and matmuls of a warpgroup (wgmma). Addresses are of shared memory.
// Source: PTX ISA 8.5.
namespace flatshard::nn::kernels::hopper {

__device__ inline std::uint32_t address_of(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// -- clusters of blocks ------------------------------------------------------

/// Returns the rank of this block in its cluster.
__device__ inline int cluster_rank() {
  int rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Each thread of a cluster calls it, and waits for the others.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n"
               "barrier.cluster.wait.acquire;" ::
                   : "memory");
}

// -- barriers ----------------------------------------------------------------

__device__ inline void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier),
      "r"(arrivals));
}
/// Copies see the barriers that were initialized.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Arrives, and lets the barrier wait for copies of `nbytes` as well.
__device__ inline void expect_copies(std::uint32_t barrier, int nbytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(nbytes)
      : "memory");
}
/// Arrives at this barrier of the cluster's block `rank`.
__device__ inline void arrive(std::uint32_t barrier, int rank) {
  asm volatile("{\n"
               ".reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
               "}" ::"r"(barrier),
               "r"(rank)
               : "memory");
}
/// Waits for the end of the phase of this parity: 0 for the first one. A phase
/// of parity 1 before the first one counts as ended.
__device__ inline void wait(std::uint32_t barrier, int parity) {
  std::uint32_t has_ended = 0;
  while (has_ended == 0) {
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, ended;\n"
                 "}"
                 : "=r"(has_ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

// -- copies ------------------------------------------------------------------

/// Queues the copy of a box of a matrix into shared memory.
///
/// @param barrier  learns of the end.
/// @param column, row  the box's first; elements outside the matrix become 0.
__device__ inline void copy_box(
    std::uint32_t to,
    const CUtensorMap& matrix,
    int column,
    int row,
    std::uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::"
               "complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(&matrix),
               "r"(column),
               "r"(row),
               "r"(barrier)
               : "memory");
}
/// Queues one copy into the memory of several blocks of a cluster, at the same
/// place in each. Each block's `barrier` learns of the end.
///
/// @param ranks  a bit for each block
__device__ inline void copy_box_to(
    unsigned ranks,
    std::uint32_t to,
    const CUtensorMap& matrix,
    int column,
    int row,
    std::uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::"
               "complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
               "[%4], %5;" ::"r"(to),
               "l"(&matrix),
               "r"(column),
               "r"(row),
               "r"(barrier),
               "h"(static_cast<std::uint16_t>(ranks))
               : "memory");
}
/// Requests a line of memory for the level 2 cache.
__device__ inline void fetch_line(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
/// Matmuls and copies that follow see what this thread wrote.
__device__ inline void fence_written() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// -- matmuls -----------------------------------------------------------------

/// Describes an operand in boxes of 128 bytes by some rows, swizzled by 128
/// bytes.
///
/// @param box_nbytes  from a box to the next one along the dimension of 64
///   elements, where there are several.
__device__ inline std::uint64_t operand(
    std::uint32_t address,
    int box_nbytes = 16) {
  constexpr std::uint64_t kEightRows = 8 * 128;
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | kEightRows / 16 << 32 |
         static_cast<std::uint64_t>(box_nbytes / 16) << 16 |
         (address & 0x3FFFF) / 16;
}
/// Before the first matmul, and after each other use of its registers.
__device__ inline void begin_matmuls() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void end_matmuls() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits for all groups of matmuls but the last N.
template <int N>
__device__ inline void wait_for_matmuls() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define FLATSHARD_SUMS8(i)                                                \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), \
      "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]),            \
      "+f"(sums[i + 7])
#define FLATSHARD_SUMS32(i)                                            \
  FLATSHARD_SUMS8(i), FLATSHARD_SUMS8(i + 8), FLATSHARD_SUMS8(i + 16), \
      FLATSHARD_SUMS8(i + 24)

/// Queues sums (+)= a b^T of a warpgroup: [64, 16] by [256, 16]. Thread t has
/// rows 16 (t / 32) + t % 32 / 4 + {0, 8}, and of these columns
/// 8 j + 2 (t % 4) + {0, 1}: sums[4 j + {0, 1}] and sums[4 j + {2, 3}].
///
/// @param add  false: overwrites
template <bool kTransposedA, bool kTransposedB>
__device__ inline void
matmul_64x256(float (&sums)[128], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
      "%30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
      "%46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
      "%78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, "
      "%94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "
      "%108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "
      "%124, %125, %126, %127"
      "}, %128, %129, adds, 1, 1, %131, %132;\n"
      "}"
      : FLATSHARD_SUMS32(0),
        FLATSHARD_SUMS32(32),
        FLATSHARD_SUMS32(64),
        FLATSHARD_SUMS32(96)
      : "l"(a),
        "l"(b),
        "r"(static_cast<int>(add)),
        "n"(kTransposedA),
        "n"(kTransposedB));
}

#undef FLATSHARD_SUMS8
#undef FLATSHARD_SUMS32

}  // namespace flatshard::nn::kernels::hopper
