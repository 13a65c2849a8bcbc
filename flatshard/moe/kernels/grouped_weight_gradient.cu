#include <type_traits>

#include "flatshard/moe/kernels/grouped_tiles.cuh"

namespace flatshard::nn::kernels {
namespace {

template <WeightGradientUse kUse>
struct WeightGradientMatmul {
  using Args = GroupedWeightGradient;
  static constexpr bool kAdds = kUse == WeightGradientUse::add_float32;
  // Four elements.
  using Pack = std::
      conditional_t<kUse == WeightGradientUse::store_bfloat16, uint2, float4>;
  static constexpr bool kHasEmptyTiles = true;
  static constexpr bool kTransposedA = true;
  static constexpr bool kTransposedB = true;

  const Args& args;
  const CUtensorMap& g;
  const CUtensorMap& x;

  class Tiles {
   public:
    __device__ explicit Tiles(const Args& args) : args_(args) {}

    __device__ bool find(int index, Tile& tile) const {
      const int per_row = args_.in / kTileColumns;
      const int per_expert = args_.out / kTileRows * per_row;
      const int expert = index / per_expert;
      const int inside = index % per_expert;
      if (expert >= args_.experts) {
        return false;
      }
      tile = {
          expert,
          inside / per_row * kTileRows,
          inside % per_row * kTileColumns,
          expert == 0 ? 0 : args_.ends[expert - 1],
          args_.ends[expert]};
      return true;
    }

   private:
    const Args& args_;
  };

  __device__ int stages(const Tile& tile) const {
    return (tile.end - tile.begin + kBox - 1) / kBox;
  }
  __device__ int row_boxes(const Tile& /*tile*/) const { return kRowBoxes; }
  __device__ void
  copy(const Tile& tile, int step, const Shared& shared, int stage) const {
    const std::uint32_t filled = shared.filled(stage);
    const int term = tile.begin + step * kBox;
    hopper::expect_copies(filled, kStageNbytes);
    copy_operand<true>(shared.a(stage), g, tile.row, term, kRowBoxes, filled);
    copy_operand<true>(
        shared.b(stage),
        x,
        tile.column,
        term,
        kColumnBoxes,
        filled);
  }
  // Zeroes the rows of other experts, and those after the last end.
  __device__ void
  clean(const Tile& tile, int step, const Shared& shared, int stage) const {
    const int rows = tile.end - tile.begin - step * kBox;
    if (rows >= kBox) {
      return;
    }
    constexpr int kPerRow = kRowNbytes / sizeof(uint4);
    const int packs = (kBox - rows) * kPerRow;  // of a box
    std::uint8_t* const first =
        shared.memory + stage * kStageNbytes + rows * kRowNbytes;
    for (int i = threadIdx.x; i < kStageBoxes * packs; i += kMultipliers) {
      std::uint8_t* const box = first + i / packs * kBoxNbytes;
      reinterpret_cast<uint4*>(box)[i % packs] = uint4{};
    }
    hopper::fence_written();
    asm volatile("bar.sync 1, %0;" ::"n"(kMultipliers) : "memory");
  }

  // @param row, column  of the tile
  __device__ Pack* pack_at(const Tile& tile, int row, int column) const {
    const std::int64_t first =
        static_cast<std::int64_t>(tile.expert) * args.out + tile.row + row;
    return static_cast<Pack*>(args.grad) +
           (first * args.in + tile.column + column) / 4;
  }
  __device__ void write_empty(const Tile& tile) const {
    if (kAdds) {
      return;
    }
    constexpr int kPerRow = kTileColumns / 4;
    for (int i = threadIdx.x; i < kTileRows * kPerRow; i += kMultipliers) {
      *pack_at(tile, i / kPerRow, i % kPerRow * 4) = Pack{};
    }
  }

  __device__ Pack* next(Pack* first, int i) const {
    return first + static_cast<std::int64_t>(row_of_pack(i)) * args.in / 4 +
           column_of_pack(i) / 4;
  }
  // Half of the packs at a time: registers are few.
  static constexpr int kHalf = kPacks / 2;

  __device__ void load(Pack* first, int from, Pack (&packs)[kHalf]) const {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      packs[i] = __ldcs(next(first, from + i));
    }
  }
  __device__ void store(
      Pack* first,
      int from,
      const float (&sums)[128],
      const Pack (&old)[kHalf]) const {
#pragma unroll
    for (int i = from; i < from + kHalf; ++i) {
      float4 sum = pack_of(sums, i);
      if constexpr (kAdds) {
        sum.x += old[i - from].x;
        sum.y += old[i - from].y;
        sum.z += old[i - from].z;
        sum.w += old[i - from].w;
      }
      if constexpr (std::is_same_v<Pack, uint2>) {
        __stcs(next(first, i), to_bfloat16(sum));
      } else {
        __stcs(next(first, i), sum);
      }
    }
  }

  template <class WaitForSums>
  __device__ void write(
      const Tile& tile,
      float (&sums)[128],
      const WaitForSums& wait_for_sums) const {
    Pack* const first = pack_at(tile, thread_row(), thread_column());
    Pack old[kHalf];
    if (kAdds) {  // in parallel with the last matmuls
      load(first, 0, old);
    }
    wait_for_sums();
    store(first, 0, sums, old);
    if (kAdds) {
      load(first, kHalf, old);
    }
    store(first, kHalf, sums, old);
  }
};

}  // namespace

cudaError_t launch(const GroupedWeightGradient& args, cudaStream_t stream) {
  using Use = WeightGradientUse;
  if (args.rows == 0) {
    const std::int64_t numel =
        static_cast<std::int64_t>(args.experts) * args.out * args.in;
    const int width = args.use == Use::store_bfloat16 ? 2 : 4;
    return args.use == Use::add_float32
               ? cudaSuccess
               : cudaMemsetAsync(args.grad, 0, numel * width, stream);
  }
  CUtensorMap g;
  CUtensorMap x;
  for (const cudaError_t error :
       {describe(g, args.g, args.rows, args.out),
        describe(x, args.x, args.rows, args.in)}) {
    if (error != cudaSuccess) {
      return error;
    }
  }
  const auto launch_as = [&]<Use kUse>() {
    return launch_matmul<WeightGradientMatmul<kUse>>(g, x, args, stream);
  };
  switch (args.use) {
    case Use::store_bfloat16:
      return launch_as.template operator()<Use::store_bfloat16>();
    case Use::store_float32:
      return launch_as.template operator()<Use::store_float32>();
    case Use::add_float32:
      return launch_as.template operator()<Use::add_float32>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace flatshard::nn::kernels
