#include "flatshard/moe/kernels/grouped_tiles.cuh"

namespace flatshard::nn::kernels {
namespace {

template <bool kIsInOut>
struct RowsMatmul {
  using Args = GroupedRows;
  using Size = Sizes<Warpgroups::share_tiles>;
  using Shared = SharedOf<Size>;
  static constexpr bool kHasEmptyTiles = false;
  static constexpr bool kTransposedA = false;
  static constexpr bool kTransposedB = kIsInOut;

  const Args& args;
  const CUtensorMap& x;
  const CUtensorMap& weight;

  // Finds tiles by the numbers of their pairs, in ascending order. The tiles of
  // an expert's last rows, if their number is odd, are pairs of the same rows.
  class Tiles {
   public:
    __device__ explicit Tiles(const Args& args)
        : args_(args), end_(args.ends[0]) {}

    __device__ bool find(int index, Tile& tile) {
      const int per_row = args_.out / kTileColumns;
      for (;;) {
        const int tiles =
            (end_ - begin_ + Size::kTileRows - 1) / Size::kTileRows;
        const int count = tiles / kPair * per_row +
                          tiles % kPair * ((per_row + kPair - 1) / kPair);
        if (index < first_ + count) {
          const int inside = index - first_;
          const int pair = inside / per_row;
          const int column = inside % per_row;
          const int rank = hopper::cluster_rank();
          const bool same_rows = pair == tiles / kPair;
          tile = {
              expert_,
              begin_ +
                  (pair * kPair + (same_rows ? 0 : rank)) * Size::kTileRows,
              (same_rows ? column * kPair + rank : column) * kTileColumns,
              begin_,
              end_,
              same_rows};
          tile.exists = tile.column < args_.out;
          return true;
        }
        if (++expert_ == args_.experts) {
          return false;
        }
        first_ += count;
        begin_ = end_;
        end_ = args_.ends[expert_];
      }
    }

   private:
    const Args& args_;
    int expert_ = 0;
    int first_ = 0;  // the number of the expert's first tile
    int begin_ = 0;
    int end_;
  };

  __device__ int stages(const Tile& /*tile*/) const { return args.in / kBox; }
  // The number of boxes of rows that it has.
  __device__ int row_boxes(const Tile& tile) const {
    return tile.end - tile.row > kBox ? 2 : 1;
  }
  __device__ void
  copy(const Tile& tile, int step, const Shared& shared, int stage) const {
    const std::uint32_t filled = shared.filled(stage);
    const int term = step * kBox;
    const int column_boxes = tile.exists ? kColumnBoxes : 0;
    hopper::expect_copies(
        filled,
        (row_boxes(tile) + column_boxes) * kBoxNbytes);
    copy_operand<false>(
        shared.a(stage),
        x,
        tile.row,
        term,
        row_boxes(tile),
        filled,
        tile.same_rows);
    if (kIsInOut) {
      copy_operand<true>(
          shared.b(stage),
          weight,
          tile.column,
          tile.expert * args.in + term,
          column_boxes,
          filled,
          !tile.same_rows);
    } else {
      copy_operand<false>(
          shared.b(stage),
          weight,
          tile.expert * args.out + tile.column,
          term,
          column_boxes,
          filled,
          !tile.same_rows);
    }
  }
  __device__ void clean(const Tile&, int /*step*/, const Shared&, int /*stage*/)
      const {}
  __device__ void fetch(const Tile&) const {}
  template <class WaitForSums>
  __device__ void write(
      const Tile& tile,
      float (&sums)[128],
      const WaitForSums& wait_for_sums) const {
    wait_for_sums();
    if (!tile.exists) {
      return;
    }
    const int first = tile.row + row_of_thread(threadIdx.x);
    __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(args.y) +
                              static_cast<std::int64_t>(first) * args.out +
                              tile.column + thread_column();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const uint2 pack = to_bfloat16(pack_of(sums, i));
      if (first + row_of_pack(i) < tile.end) {
        *reinterpret_cast<uint2*>(
            to + static_cast<std::int64_t>(row_of_pack(i)) * args.out +
            column_of_pack(i)) = pack;
      }
    }
  }
};

}  // namespace

cudaError_t launch(const GroupedRows& args, cudaStream_t stream) {
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const std::int64_t matrices = args.experts;
  CUtensorMap x;
  CUtensorMap weight;
  for (const cudaError_t error :
       {describe(x, args.x, args.rows, args.in),
        args.is_in_out
            ? describe(weight, args.weight, matrices * args.in, args.out)
            : describe(weight, args.weight, matrices * args.out, args.in)}) {
    if (error != cudaSuccess) {
      return error;
    }
  }
  return args.is_in_out
             ? launch_matmul<RowsMatmul<true>>(x, weight, args, stream)
             : launch_matmul<RowsMatmul<false>>(x, weight, args, stream);
}

}  // namespace flatshard::nn::kernels
