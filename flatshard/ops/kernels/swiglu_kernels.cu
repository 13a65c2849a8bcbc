#include "flatshard/ops/kernels/amax.cuh"
#include "flatshard/ops/kernels/swiglu_kernels.cuh"

namespace flatshard::nn::kernels {
namespace {

template <class T, int N>
__device__ inline std::uint32_t
forward_pack(const T* gate, const T* up, T* y, std::int64_t at) {
  float g[N];
  float u[N];
  load<T, N>(gate + at, g);
  load<T, N>(up + at, u);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    g[i] = swiglu(g[i], sigmoid(g[i]), u[i]);
  }
  store<T, N>(y + at, g);
  return stored_amax<T>(g);
}

template <class T, int N>
__device__ inline void backward_pack(
    const T* dy,
    const T* gate,
    const T* up,
    T* dgate,
    T* dup,
    T* product,
    std::int64_t at,
    std::uint32_t (&found)[2]) {
  float d[N];
  float g[N];
  float u[N];
  load<T, N>(dy + at, d);
  load<T, N>(gate + at, g);
  load<T, N>(up + at, u);
  float p[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float s = sigmoid(g[i]);
    p[i] = swiglu(g[i], s, u[i]);
    const SwigluGradient gradient = swiglu_gradient(d[i], g[i], s, u[i]);
    g[i] = gradient.gate;
    u[i] = gradient.up;
  }
  if (product != nullptr) {  // may be dy: it was read above
    store<T, N>(product + at, p);
  }
  store<T, N>(dgate + at, g);
  store<T, N>(dup + at, u);
  found[0] = larger(found[0], stored_amax<T>(g));
  found[1] = larger(found[1], stored_amax<T>(u));
}

// The thread after the last full pack handles the rest one by one.
template <class T, int N, class F>
__device__ inline void for_each_pack(std::int64_t numel, F&& run) {
  const std::int64_t pack =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t at = pack * N;
  if (at + N <= numel) {
    run.template operator()<N>(at);
  } else {
    for (std::int64_t i = at; i < numel; ++i) {
      run.template operator()<1>(i);
    }
  }
}

template <class T, int N, bool Amax>
__global__ void swiglu_forward_kernel(
    const T* gate,
    const T* up,
    T* y,
    std::int64_t numel,
    float* amax) {
  std::uint32_t found = 0;
  for_each_pack<T, N>(numel, [&]<int M>(std::int64_t at) {
    found = larger(found, forward_pack<T, M>(gate, up, y, at));
  });
  if constexpr (Amax) {
    deliver_amax(found, amax);
  }
}

template <class T, int N, bool Amax>
__global__ void swiglu_backward_kernel(
    const T* dy,
    const T* gate,
    const T* up,
    T* dgate,
    T* dup,
    T* product,
    std::int64_t numel,
    float* amax) {
  std::uint32_t found[2] = {0, 0};
  for_each_pack<T, N>(numel, [&]<int M>(std::int64_t at) {
    backward_pack<T, M>(dy, gate, up, dgate, dup, product, at, found);
  });
  if constexpr (Amax) {
    deliver_amax(found, amax);
  }
}

constexpr int kThreads = 256;

// Calls run<N, whether amax is needed>(grid).
template <class T, class Run>
void launch(std::int64_t numel, bool wide, const float* amax, Run&& run) {
  constexpr int kN = kWide<T>;
  const auto with = [&]<int N>() {
    const int grid = divide_up(divide_up(numel, N), kThreads);
    amax != nullptr ? run.template operator()<N, true>(grid)
                    : run.template operator()<N, false>(grid);
  };
  wide ? with.template operator()<kN>() : with.template operator()<1>();
}

}  // namespace

void swiglu_forward(
    const void* gate,
    const void* up,
    void* y,
    std::int64_t numel,
    Dtype dtype,
    cudaStream_t stream,
    float* amax) {
  if (numel == 0) {
    return;
  }
  const bool wide = aligned16(gate) && aligned16(up) && aligned16(y);
  with_type(dtype, [&]<class T>() {
    launch<T>(numel, wide, amax, [&]<int N, bool Amax>(int grid) {
      swiglu_forward_kernel<T, N, Amax><<<grid, kThreads, 0, stream>>>(
          static_cast<const T*>(gate),
          static_cast<const T*>(up),
          static_cast<T*>(y),
          numel,
          amax);
    });
  });
}

void swiglu_backward(
    const void* dy,
    const void* gate,
    const void* up,
    void* dgate,
    void* dup,
    void* product,
    std::int64_t numel,
    Dtype dtype,
    cudaStream_t stream,
    float* amax) {
  if (numel == 0) {
    return;
  }
  const bool wide = aligned16(dy) && aligned16(gate) && aligned16(up) &&
                    aligned16(dgate) && aligned16(dup) && aligned16(product);
  with_type(dtype, [&]<class T>() {
    launch<T>(numel, wide, amax, [&]<int N, bool Amax>(int grid) {
      swiglu_backward_kernel<T, N, Amax><<<grid, kThreads, 0, stream>>>(
          static_cast<const T*>(dy),
          static_cast<const T*>(gate),
          static_cast<const T*>(up),
          static_cast<T*>(dgate),
          static_cast<T*>(dup),
          static_cast<T*>(product),
          numel,
          amax);
    });
  });
}

}  // namespace flatshard::nn::kernels
