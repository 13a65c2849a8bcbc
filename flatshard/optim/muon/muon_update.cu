#include <cuda_bf16.h>

#include "flatshard/core/rounding.h"
#include "flatshard/optim/optim_kernels.h"

namespace flatshard::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;

// Values that are loaded and stored at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <class T, int N>
__device__ Pack<T, N> load(const void* from, std::int64_t i) {
  return *reinterpret_cast<const Pack<T, N>*>(static_cast<const T*>(from) + i);
}

template <class T, int N>
__device__ void store(void* to, std::int64_t i, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(static_cast<T*>(to) + i) = pack;
}

__device__ float widened(float value) {
  return value;
}
__device__ float widened(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// start + weight * (end - start), rounded as by the CPU's loop.
__device__ float lerp(float start, float end, float weight) {
  const float difference = __fadd_rn(end, -start);
  return fabsf(weight) < 0.5F
             ? __fmaf_rn(weight, difference, start)
             : __fmaf_rn(__fadd_rn(weight, -1.0F), difference, end);
}

template <class Grad>
struct Direction {
  MuonDirection p;

  template <int N>
  __device__ void update(std::int64_t i) const {
    const float scale = p.grad_scale == nullptr ? 1.0F : *p.grad_scale;
    const auto grad = load<Grad, N>(p.grad, i);
    auto m = load<float, N>(p.buffer, i);
    Pack<__nv_bfloat16, N> direction;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float g = __fmul_rn(widened(grad.v[j]), scale);
      m.v[j] = lerp(m.v[j], g, p.rest);
      direction.v[j] = __float2bfloat16_rn(
          p.nesterov ? lerp(g, m.v[j], p.momentum) : m.v[j]);
    }
    store(p.buffer, i, m);
    store(p.direction, i, direction);
  }
};

struct Apply {
  MuonApply p;

  template <int N>
  __device__ void update(std::int64_t i) const {
    const auto direction = load<__nv_bfloat16, N>(p.direction, i);
    auto w = load<float, N>(p.main, i);
    Pack<__nv_bfloat16, N> compute;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      w.v[j] = __fmaf_rn(
          -p.step,
          widened(direction.v[j]),
          __fmul_rn(w.v[j], p.keep));
      compute.v[j] = __float2bfloat16_rn(w.v[j]);
    }
    store(p.main, i, w);
    if (p.compute != nullptr) {
      store(p.compute, i, compute);
    }
  }
};

template <class Update, int N>
__global__ void __launch_bounds__(kThreads)
    elements_kernel(const Update update, std::int64_t numel) {
  const std::int64_t i =
      (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i + N <= numel) {
    update.template update<N>(i);
  } else {
    for (std::int64_t k = i; k < numel; ++k) {
      update.template update<1>(k);
    }
  }
}

template <class Update>
void for_elements(
    const Update& update,
    std::int64_t numel,
    bool is_aligned,
    cudaStream_t stream) {
  if (numel == 0) {
    return;
  }
  const int each = is_aligned ? kVector : 1;
  const auto grid = static_cast<unsigned>(ceil_div(numel, kThreads * each));
  if (is_aligned) {
    elements_kernel<Update, kVector>
        <<<grid, kThreads, 0, stream>>>(update, numel);
  } else {
    elements_kernel<Update, 1><<<grid, kThreads, 0, stream>>>(update, numel);
  }
}

bool is_aligned(const void* pointer, std::size_t element_size) {
  return reinterpret_cast<std::uintptr_t>(pointer) % (element_size * kVector) ==
         0;
}

constexpr int kTile = 64;
constexpr int kTileRows = 8;  // of threads; a thread has two columns

__global__ void __launch_bounds__(kTile / 2 * kTileRows)
    mirror_kernel(std::uint16_t* matrix, int rows) {
  const int from_row = static_cast<int>(blockIdx.y);
  const int from_column = static_cast<int>(blockIdx.x);
  if (from_column > from_row) {
    return;
  }
  __shared__ std::uint16_t tile[kTile][kTile + 2];
  const int column = static_cast<int>(threadIdx.x) * 2;
  const std::uint16_t* from =
      matrix + std::int64_t{from_row} * kTile * rows + from_column * kTile;
  for (int r = static_cast<int>(threadIdx.y); r < kTile; r += kTileRows) {
    const auto pair =
        load<std::uint16_t, 2>(from, std::int64_t{r} * rows + column);
    tile[r][column] = pair.v[0];
    tile[r][column + 1] = pair.v[1];
  }
  __syncthreads();
  std::uint16_t* to =
      matrix + std::int64_t{from_column} * kTile * rows + from_row * kTile;
  for (int r = static_cast<int>(threadIdx.y); r < kTile; r += kTileRows) {
    Pack<std::uint16_t, 2> pair = {{tile[column][r], tile[column + 1][r]}};
    if (from_row == from_column) {
      // A diagonal tile keeps what is on and below its diagonal.
      pair.v[0] = column > r ? pair.v[0] : tile[r][column];
      pair.v[1] = column + 1 > r ? pair.v[1] : tile[r][column + 1];
    }
    store(to, std::int64_t{r} * rows + column, pair);
  }
}

}  // namespace

void muon_direction(const MuonDirection& p, cudaStream_t stream) {
  const bool aligned = is_aligned(p.grad, p.is_bfloat16 ? 2 : 4) &&
                       is_aligned(p.buffer, 4) && is_aligned(p.direction, 2);
  if (p.is_bfloat16) {
    for_elements(Direction<__nv_bfloat16>{p}, p.numel, aligned, stream);
  } else {
    for_elements(Direction<float>{p}, p.numel, aligned, stream);
  }
}

void muon_apply(const MuonApply& p, cudaStream_t stream) {
  const bool aligned = is_aligned(p.main, 4) && is_aligned(p.compute, 2) &&
                       is_aligned(p.direction, 2);
  for_elements(Apply{p}, p.numel, aligned, stream);
}

void mirror_lower(void* matrix, int rows, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(rows / kTile);
  mirror_kernel<<<dim3(tiles, tiles), dim3(kTile / 2, kTileRows), 0, stream>>>(
      static_cast<std::uint16_t*>(matrix),
      rows);
}

}  // namespace flatshard::kernels
