#include "flatshard/exchange/narrow_rows.h"

#include "flatshard/moe/cuda_moe.h"

#include <cstring>

namespace flatshard {

void copy_narrow_rows(
    const nn::kernels::CopyNarrowRows& rows,
    at::Device device) {
  if (device.is_cuda()) {
    nn::cuda::launch(rows, device);
    return;
  }
  const std::int32_t* const at_home = rows.runs + rows.num_runs + 1;
  for (int run = 0; run < rows.num_runs; ++run) {
    auto* const window =
        reinterpret_cast<char*>(rows.windows[run % rows.num_ranks]) +
        rows.in_window;
    // The rows of a run follow each other on both sides.
    auto* const there = reinterpret_cast<std::uint32_t*>(window) +
                        std::int64_t{at_home[run]} * rows.words;
    auto* const mine = rows.here + std::int64_t{rows.runs[run]} * rows.words;
    std::memcpy(
        rows.gathers ? mine : there,
        rows.gathers ? there : mine,
        sizeof(std::uint32_t) * rows.words *
            (rows.runs[run + 1] - rows.runs[run]));
  }
}

}  // namespace flatshard
