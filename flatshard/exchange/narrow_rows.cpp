#include "flatshard/exchange/narrow_rows.h"

#include <cstring>

#include "flatshard/exchange/backend.h"

namespace flatshard {

void NarrowRows::copy(void* here, bool gathers) const {
  if (runs.is_cuda()) {
    detail::cuda_copy_narrow_rows(*this, here, gathers);
    return;
  }
  const std::int64_t num_runs = runs.size(1) - 1;
  const auto* const begins = runs.const_data_ptr<std::int32_t>();
  const auto* const at_home = begins + num_runs + 1;
  const auto* const addresses = windows.const_data_ptr<std::int64_t>();
  for (std::int64_t run = 0; run < num_runs; ++run) {
    char* const window =
        reinterpret_cast<char*>(addresses[run % windows.numel()]) + in_window;
    // The rows of a run follow each other on both sides.
    char* const there = window + at_home[run] * row_nbytes;
    char* const mine = static_cast<char*>(here) + begins[run] * row_nbytes;
    std::memcpy(
        gathers ? mine : there,
        gathers ? there : mine,
        (begins[run + 1] - begins[run]) * row_nbytes);
  }
}

}  // namespace flatshard
