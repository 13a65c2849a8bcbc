#include "flatshard/nn/kernels/common.cuh"

namespace flatshard::nn::kernels {
namespace {

__device__ inline float sigmoid(float v) {
  return 1.0F / (1.0F + __expf(-v));
}

// With the sigmoid of gate. Forward and backward round alike.
__device__ inline float swiglu(float gate, float sigmoid, float up) {
  return gate * (sigmoid * up);
}

template <class T, int N>
__device__ inline void
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
}

template <class T, int N>
__device__ inline void backward_pack(
    const T* dy,
    const T* gate,
    const T* up,
    T* dgate,
    T* dup,
    T* product,
    std::int64_t at) {
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
    const float silu = g[i] * s;
    p[i] = swiglu(g[i], s, u[i]);
    g[i] = d[i] * u[i] * (s + silu * (1.0F - s));
    u[i] = d[i] * silu;
  }
  if (product != nullptr) {  // may be dy, which was read above
    store<T, N>(product + at, p);
  }
  store<T, N>(dgate + at, g);
  store<T, N>(dup + at, u);
}

// The thread after the last whole pack handles the rest one by one.
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

template <class T, int N>
__global__ void
swiglu_forward_kernel(const T* gate, const T* up, T* y, std::int64_t numel) {
  for_each_pack<T, N>(numel, [&]<int M>(std::int64_t at) {
    forward_pack<T, M>(gate, up, y, at);
  });
}

template <class T, int N>
__global__ void swiglu_backward_kernel(
    const T* dy,
    const T* gate,
    const T* up,
    T* dgate,
    T* dup,
    T* product,
    std::int64_t numel) {
  for_each_pack<T, N>(numel, [&]<int M>(std::int64_t at) {
    backward_pack<T, M>(dy, gate, up, dgate, dup, product, at);
  });
}

constexpr int kThreads = 256;

template <class T>
void launch_forward(
    const T* gate,
    const T* up,
    T* y,
    std::int64_t numel,
    cudaStream_t stream) {
  constexpr int kN = kWide<T>;
  if (aligned16(gate) && aligned16(up) && aligned16(y)) {
    const int grid = divide_up(divide_up(numel, kN), kThreads);
    swiglu_forward_kernel<T, kN>
        <<<grid, kThreads, 0, stream>>>(gate, up, y, numel);
  } else {
    const int grid = divide_up(numel, kThreads);
    swiglu_forward_kernel<T, 1>
        <<<grid, kThreads, 0, stream>>>(gate, up, y, numel);
  }
}

template <class T>
void launch_backward(
    const T* dy,
    const T* gate,
    const T* up,
    T* dgate,
    T* dup,
    T* product,
    std::int64_t numel,
    cudaStream_t stream) {
  constexpr int kN = kWide<T>;
  if (aligned16(dy) && aligned16(gate) && aligned16(up) && aligned16(dgate) &&
      aligned16(dup) && aligned16(product)) {
    const int grid = divide_up(divide_up(numel, kN), kThreads);
    swiglu_backward_kernel<T, kN><<<grid, kThreads, 0, stream>>>(
        dy,
        gate,
        up,
        dgate,
        dup,
        product,
        numel);
  } else {
    const int grid = divide_up(numel, kThreads);
    swiglu_backward_kernel<T, 1><<<grid, kThreads, 0, stream>>>(
        dy,
        gate,
        up,
        dgate,
        dup,
        product,
        numel);
  }
}

}  // namespace

void swiglu_forward(
    const void* gate,
    const void* up,
    void* y,
    std::int64_t numel,
    Dtype dtype,
    cudaStream_t stream) {
  if (numel == 0) {
    return;
  }
  const auto run = [&]<class T>(T) {
    launch_forward(
        static_cast<const T*>(gate),
        static_cast<const T*>(up),
        static_cast<T*>(y),
        numel,
        stream);
  };
  dtype == Dtype::f32 ? run(float{}) : run(__nv_bfloat16{});
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
    cudaStream_t stream) {
  if (numel == 0) {
    return;
  }
  const auto run = [&]<class T>(T) {
    launch_backward(
        static_cast<const T*>(dy),
        static_cast<const T*>(gate),
        static_cast<const T*>(up),
        static_cast<T*>(dgate),
        static_cast<T*>(dup),
        static_cast<T*>(product),
        numel,
        stream);
  };
  dtype == Dtype::f32 ? run(float{}) : run(__nv_bfloat16{});
}

}  // namespace flatshard::nn::kernels
