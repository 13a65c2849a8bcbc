#include "flatshard/ops/kernels/common.cuh"

namespace flatshard::nn::kernels {
namespace {

// Tokens of one id are a run. One block adds up the rows of a run in their
// order, so that each row of the table has one writer. A run that crosses a
// multiple of kPiece is divided there: blocks add up its pieces, and a second
// kernel adds these. A frequent token would otherwise keep one block busy.
constexpr int kPiece = AddTokenRows::kPiece;

template <class T, int N>
__device__ inline void add_row(float (&sum)[N], const T* row) {
  float values[N];
  load<T, N>(row, values);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] += values[i];
  }
}

template <int N>
__device__ inline void add_to(float* to, float (&sum)[N]) {
  add_row<float, N>(sum, to);
  store<float, N>(to, sum);
}

// Calls add(i) for each i in [from, end) up to the first one with another id,
// several at once.
//
// @param ids  [end], ascending, `stride` apart
template <class Add>
__device__ inline void for_run(
    const std::int64_t* ids,
    int stride,
    std::int64_t from,
    std::int64_t end,
    std::int64_t id,
    const Add& add) {
  constexpr int kAtOnce = 8;
  for (; from + kAtOnce <= end && ids[(from + kAtOnce - 1) * stride] == id;
       from += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      add(from + i);
    }
  }
  for (; from < end && ids[from * stride] == id; ++from) {
    add(from);
  }
}

// A block for each token that is the first of a run or of a piece.
template <class T, int N>
__global__ void __launch_bounds__(256)
    add_token_rows_kernel(const AddTokenRows a) {
  const std::int64_t first = blockIdx.x;
  const std::int64_t id = a.ids[first];
  const bool starts_run = first == 0 || a.ids[first - 1] != id;
  if (id >= a.table_rows || (!starts_run && first % kPiece != 0)) {
    return;
  }
  const std::int64_t border = (first / kPiece + 1) * kPiece;
  const bool crosses = border < a.tokens && a.ids[border] == id;
  const std::int64_t end = border < a.tokens ? border : a.tokens;
  const bool is_run = starts_run && !crosses;
  // Only the last run of a piece starts inside it and crosses its border.
  float* const to =
      is_run ? a.table + id * a.dim
             : a.pieces +
                   (first / kPiece * 2 + (first % kPiece == 0 ? 0 : 1)) * a.dim;
  const T* const rows = static_cast<const T*>(a.rows);
  for (std::int64_t column = threadIdx.x * N; column < a.dim;
       column += blockDim.x * N) {
    float sum[N] = {};
    for_run(a.ids, 1, first, end, id, [&](std::int64_t token) {
      add_row<T, N>(sum, rows + a.order[token] * a.dim + column);
    });
    if (is_run) {
      add_to<N>(to + column, sum);
    } else {
      store<float, N>(to + column, sum);
    }
  }
}

// A block for each border, and some of the columns. It adds the pieces of the
// run that crosses this border first.
template <int N>
__global__ void __launch_bounds__(256) add_pieces_kernel(const AddTokenRows a) {
  const std::int64_t border = (std::int64_t{blockIdx.x} + 1) * kPiece;
  const std::int64_t id = a.ids[border];
  const std::int64_t before = border - kPiece;
  const bool crosses = a.ids[border - 1] == id;
  const bool crosses_earlier =
      before > 0 && a.ids[before] == id && a.ids[before - 1] == id;
  const std::int64_t column =
      (std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * N;
  if (id >= a.table_rows || !crosses || crosses_earlier || column >= a.dim) {
    return;
  }
  const bool starts_inside = a.ids[before] != id;
  float sum[N] = {};
  add_row<float, N>(
      sum,
      a.pieces + (before / kPiece * 2 + (starts_inside ? 1 : 0)) * a.dim +
          column);
  const std::int64_t end = (a.tokens + kPiece - 1) / kPiece;
  for_run(a.ids, kPiece, border / kPiece, end, id, [&](std::int64_t piece) {
    add_row<float, N>(sum, a.pieces + piece * 2 * a.dim + column);
  });
  add_to<N>(a.table + id * a.dim + column, sum);
}

template <class T, int N>
void launch(const AddTokenRows& a, cudaStream_t stream) {
  const int threads =
      a.dim >= 256 * N ? 256 : divide_up(divide_up(a.dim, N), 32) * 32;
  add_token_rows_kernel<T, N><<<a.tokens, threads, 0, stream>>>(a);
  const int borders = static_cast<int>((a.tokens - 1) / kPiece);
  if (borders > 0) {
    const dim3 blocks(borders, divide_up(a.dim, threads * N));
    add_pieces_kernel<N><<<blocks, threads, 0, stream>>>(a);
  }
}

}  // namespace

void add_token_rows(const AddTokenRows& a, cudaStream_t stream) {
  if (a.tokens == 0 || a.dim == 0) {
    return;
  }
  constexpr int kPack = 4;  // 16 bytes of the table
  const bool wide = a.dim % kPack == 0 && aligned16(a.rows) &&
                    aligned16(a.table) && aligned16(a.pieces);
  with_type(a.dtype, [&]<class T>() {
    wide ? launch<T, kPack>(a, stream) : launch<T, 1>(a, stream);
  });
}

}  // namespace flatshard::nn::kernels
