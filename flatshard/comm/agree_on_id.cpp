#include "flatshard/comm/agree_on_id.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <random>

namespace flatshard {

std::string agree_on_id(Communicator& group) {
  const at::Tensor id = at::zeros({1}, at::kLong);
  if (group.rank() == 0) {
    std::random_device random;
    id.fill_(static_cast<std::int64_t>(
        (std::uint64_t{random()} << 32 | random()) >> 1));
  }
  const at::Tensor shared = id.to(group.device());
  group.broadcast(shared, 0);
  return fmt::format("{:x}", shared.item<std::int64_t>());
}

}  // namespace flatshard
