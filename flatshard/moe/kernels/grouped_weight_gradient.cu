#include <type_traits>

#include "flatshard/moe/kernels/grouped_tiles.cuh"

namespace flatshard::nn::kernels {
namespace {

template <WeightGradientUse kUse, Warpgroups kWarpgroups>
struct WeightGradientMatmul {
  using Args = GroupedWeightGradient;
  using Size = Sizes<kWarpgroups>;
  using Shared = SharedOf<Size>;
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
      const int per_expert = args_.out / (kPair * Size::kTileRows) * per_row;
      const int expert = index / per_expert;
      const int inside = index % per_expert;
      if (expert >= args_.experts) {
        return false;
      }
      tile = {
          expert,
          (inside / per_row * kPair + hopper::cluster_rank()) * Size::kTileRows,
          inside % per_row * kTileColumns,
          expert == 0 ? 0 : args_.ends[expert - 1],
          args_.ends[expert],
          /*same_rows=*/false,
          /*exists=*/true};
      return true;
    }

   private:
    const Args& args_;
  };

  __device__ int stages(const Tile& tile) const {
    return (tile.end - tile.begin + kBox - 1) / kBox;
  }
  __device__ int row_boxes(const Tile& /*tile*/) const {
    return Size::kRowBoxes;
  }
  __device__ void
  copy(const Tile& tile, int step, const Shared& shared, int stage) const {
    const std::uint32_t filled = shared.filled(stage);
    const int term = tile.begin + step * kBox;
    hopper::expect_copies(filled, Size::kStageNbytes);
    copy_operand<true>(
        shared.a(stage),
        g,
        tile.row,
        term,
        Size::kRowBoxes,
        filled,
        tile.same_rows);
    copy_operand<true>(
        shared.b(stage),
        x,
        tile.column,
        term,
        kColumnBoxes,
        filled,
        !tile.same_rows);
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
        shared.memory + stage * Size::kStageNbytes + rows * kRowNbytes;
    for (int i = thread(); i < Size::kStageBoxes * packs;
         i += Size::kThreadsOfTile) {
      std::uint8_t* const box = first + i / packs * kBoxNbytes;
      reinterpret_cast<uint4*>(box)[i % packs] = uint4{};
    }
    hopper::fence_written();
    asm volatile(
        "bar.sync %0, %1;" ::"r"(1 + threadIdx.x / Size::kThreadsOfTile),
        "n"(Size::kThreadsOfTile)
        : "memory");
  }
  // Returns the number of this thread among those that have its tile.
  __device__ static int thread() { return threadIdx.x % Size::kThreadsOfTile; }

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
    for (int i = thread(); i < Size::kTileRows * kPerRow;
         i += Size::kThreadsOfTile) {
      *pack_at(tile, i / kPerRow, i % kPerRow * 4) = Pack{};
    }
  }

  __device__ Pack* next(Pack* first, int i) const {
    return first + static_cast<std::int64_t>(row_of_pack(i)) * args.in / 4 +
           column_of_pack(i) / 4;
  }
  // Requests the gradient's tile. It is read after the last matmul.
  __device__ void fetch(const Tile& tile) const {
    if (kAdds && Size::kTurns) {
      constexpr int kLineNbytes = 128;
      constexpr int kLines = kTileColumns * sizeof(float) / kLineNbytes;
      for (int i = thread(); i < Size::kTileRows * kLines;
           i += Size::kThreadsOfTile) {
        const Pack* const row = pack_at(tile, i / kLines, 0);
        hopper::fetch_line(row + i % kLines * (kLineNbytes / sizeof(Pack)));
      }
    }
  }

  // Packs at a time: registers are few.
  static constexpr int kPart = 8;
  static constexpr int kParts = kPacks / kPart;

  __device__ void load(Pack* first, int part, Pack (&packs)[kPart]) const {
    if constexpr (kAdds) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        packs[i] = __ldcs(next(first, part * kPart + i));
      }
    }
  }
  __device__ void store(
      Pack* first,
      int part,
      const float (&sums)[128],
      const Pack (&old)[kPart]) const {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      float4 sum = pack_of(sums, part * kPart + i);
      if constexpr (kAdds) {
        sum.x += old[i].x;
        sum.y += old[i].y;
        sum.z += old[i].z;
        sum.w += old[i].w;
      }
      Pack* const to = next(first, part * kPart + i);
      if constexpr (std::is_same_v<Pack, uint2>) {
        __stcs(to, to_bfloat16(sum));
      } else {
        __stcs(to, sum);
      }
    }
  }

  template <class WaitForSums>
  __device__ void write(
      const Tile& tile,
      float (&sums)[128],
      const WaitForSums& wait_for_sums) const {
    Pack* const first = pack_at(tile, row_of_thread(thread()), thread_column());
    Pack old[2][kPart];      // loaded two parts ahead
    load(first, 0, old[0]);  // in parallel with the last matmuls
    load(first, 1, old[1]);
    wait_for_sums();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store(first, part, sums, old[part % 2]);
      if (part + 2 < kParts) {
        load(first, part + 2, old[part % 2]);
      }
    }
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
  // With few terms, a tile's matmuls are as short as its write.
  constexpr std::int64_t kManyTerms = 2048;
  const bool has_many_terms = args.rows / args.experts >= kManyTerms;
  const auto launch_as = [&]<Use kUse>() {
    return has_many_terms
               ? launch_matmul<
                     WeightGradientMatmul<kUse, Warpgroups::share_tiles>>(
                     g,
                     x,
                     args,
                     stream)
               : launch_matmul<
                     WeightGradientMatmul<kUse, Warpgroups::alternate>>(
                     g,
                     x,
                     args,
                     stream);
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
