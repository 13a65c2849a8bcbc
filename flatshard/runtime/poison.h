#pragma once

#include "flatshard/unit/slot_view.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// A parameter for which poisoned memory is made.
struct PoisonSpec {
  std::string unit;
  std::string name;
  std::size_t nbytes = 0;
};

/// Addresses for released parameters to point at, one per spec. Each shared
/// pointer keeps what it points at alive.
///
/// CPU: address space without memory; touching it is a segmentation fault, and
/// a handler writes the parameter's name to standard error before the process
/// ends as it would have (the handlers that were there before run next).
/// CUDA: one block of NaN as large as the largest parameter, for all of them.
///
/// @param who  goes before the message, e.g. "rank 3/8".
std::vector<std::shared_ptr<void>> make_poison(
    at::Device device,
    const std::string& who,
    const std::vector<PoisonSpec>& parameters);

/// The step that the message names; one per process.
void set_poison_step(std::int64_t step);

/// Fills a slot with bytes that are NaN in every floating type. On the current
/// stream.
void fill_with_nan(const SlotView& slot);

}  // namespace flatshard
