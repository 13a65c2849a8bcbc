#include "flatshard/exchange/narrow_rows.h"

#include <cstring>

#include "flatshard/exchange/backend.h"

namespace flatshard {
namespace {

// Calls copy(row here, row in its window) for each row.
template <class Copy>
void for_each_row(const NarrowRows& rows, Copy&& copy) {
  const std::int64_t num_runs = rows.runs.size(1) - 1;
  const auto* const begins = rows.runs.const_data_ptr<std::int32_t>();
  const auto* const at_home = begins + num_runs + 1;
  const auto* const windows = rows.windows.const_data_ptr<std::int64_t>();
  for (std::int64_t run = 0; run < num_runs; ++run) {
    char* const window =
        reinterpret_cast<char*>(windows[run % rows.windows.numel()]) +
        rows.in_window;
    for (std::int64_t row = begins[run]; row < begins[run + 1]; ++row) {
      copy(
          row * rows.row_nbytes,
          window + (at_home[run] + row - begins[run]) * rows.row_nbytes);
    }
  }
}

}  // namespace

void NarrowRows::gather(void* here) const {
  if (runs.is_cuda()) {
    detail::cuda_copy_narrow_rows(*this, here, /*gathers=*/true);
    return;
  }
  for_each_row(*this, [&](std::int64_t at, const char* there) {
    std::memcpy(static_cast<char*>(here) + at, there, row_nbytes);
  });
}

void NarrowRows::scatter(const void* here) const {
  if (runs.is_cuda()) {
    detail::cuda_copy_narrow_rows(
        *this,
        const_cast<void*>(here),
        /*gathers=*/false);
    return;
  }
  for_each_row(*this, [&](std::int64_t at, char* there) {
    std::memcpy(there, static_cast<const char*>(here) + at, row_nbytes);
  });
}

}  // namespace flatshard
