#include "flatshard/core/rounding.h"
#include "flatshard/device/pack.cuh"
#include "flatshard/device/philox_rounds.cuh"
#include "flatshard/device/with_float_dtype.cuh"
#include "flatshard/group/draw.h"
#include "flatshard/group/initializer_kernel.h"

namespace flatshard::kernels {
namespace {

constexpr int kThreads = 256;

// A thread draws one block of a run. The first and the last block of a run may
// have elements outside the run.
template <class T>
__global__ void draw_runs_kernel(
    T* out,
    std::uint64_t key,
    InitSpec spec,
    DrawnRuns runs,
    std::int64_t blocks_per_run) {
  const std::int64_t thread =
      static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t run = thread / blocks_per_run;
  if (run >= runs.size) {
    return;
  }
  const std::int64_t begin =
      runs.begins == nullptr ? runs.begin : runs.begins[run];
  const std::int64_t block = begin / 4 + thread % blocks_per_run;
  const std::int64_t first = block * 4 - begin;  // in the run
  if (first >= runs.numel) {
    return;
  }
  uint4 c{
      static_cast<std::uint32_t>(block),
      static_cast<std::uint32_t>(block >> 32),
      0,
      0};
  philox(
      c,
      static_cast<std::uint32_t>(key),
      static_cast<std::uint32_t>(key >> 32));
  const std::uint32_t words[4] = {c.x, c.y, c.z, c.w};
  float values[4];
  draw::values_of(words, spec, values);
  T* const to = out + run * runs.numel + first;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i >= 0 && first + i < runs.numel) {
      to[i] = from_float<T>(values[i]);
    }
  }
}

}  // namespace

cudaError_t draw_runs(
    void* out,
    FloatDtype dtype,
    std::uint64_t key,
    const InitSpec& spec,
    const DrawnRuns& runs,
    cudaStream_t stream) {
  // One more if the first block starts before the run.
  const std::int64_t blocks_per_run = runs.numel / 4 + 2;
  const auto grid =
      static_cast<unsigned>(ceil_div(runs.size * blocks_per_run, kThreads));
  with_dtype(dtype, [&]<class T>(T) {
    draw_runs_kernel<<<grid, kThreads, 0, stream>>>(
        static_cast<T*>(out),
        key,
        spec,
        runs,
        blocks_per_run);
  });
  return cudaPeekAtLastError();
}

}  // namespace flatshard::kernels
