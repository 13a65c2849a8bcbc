#include "flatshard/graphs/graph_uses.h"

#include <algorithm>

namespace flatshard {

bool GraphUses::blocks(std::int64_t number) {
  while (!uses_.empty() && uses_.back().token.expired()) {
    uses_.pop_back();
  }
  return !uses_.empty() && uses_.back().number >= number;
}

std::shared_ptr<void> GraphUses::begin(std::int64_t number) {
  ++clock_;
  last_clock_.resize(static_cast<std::size_t>(num_recorded_) + 1);
  last_clock_[static_cast<std::size_t>(number)] = clock_;
  auto token = std::make_shared<int>();
  uses_.push_back({number, token});
  return token;
}

bool GraphUses::began_before(std::int64_t number, std::int64_t since) const {
  return std::any_of(
      last_clock_.begin(),
      last_clock_.begin() + number,
      [&](std::int64_t clock) { return clock > since; });
}

}  // namespace flatshard
