#include "flatshard/comm/launch_order.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "flatshard/comm/communicator.h"

namespace flatshard {
namespace {

// Guards `num_taken_` of all orders.
std::mutex taking;

LaunchOrder::Orders orders_of(std::span<Communicator* const> groups) {
  LaunchOrder::Orders orders;
  for (Communicator* const group : groups) {
    const auto& order = group->launch_order();
    if (order && std::ranges::find(orders, order) == orders.end()) {
      orders.push_back(order);
    }
  }
  return orders;
}

}  // namespace

LaunchOrder::Turn::Turn(Orders orders) : orders_(std::move(orders)) {
  const std::lock_guard lock(taking);
  for (const auto& order : orders_) {
    numbers_.push_back(order->num_taken_++);
  }
}

LaunchOrder::Turn::~Turn() {
  for (std::size_t i = 0; i < orders_.size(); ++i) {
    orders_[i]->end(numbers_[i]);
  }
}

void LaunchOrder::Turn::begin() {
  for (std::size_t i = 0; i < orders_.size(); ++i) {
    orders_[i]->begin(numbers_[i]);
  }
}

std::vector<std::int64_t> LaunchOrder::num_taken(const Orders& orders) {
  std::vector<std::int64_t> counts;
  const std::lock_guard lock(taking);
  for (const auto& order : orders) {
    counts.push_back(order ? order->num_taken_ : 0);
  }
  return counts;
}

bool LaunchOrder::is_mine() const {
  const std::lock_guard lock(mutex_);
  return holder_ == std::this_thread::get_id();
}

void LaunchOrder::begin(std::int64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return current_ == number; });
  holder_ = std::this_thread::get_id();
}

void LaunchOrder::end(std::int64_t number) {
  {
    const std::lock_guard lock(mutex_);
    if (number != current_) {
      over_.insert(number);
      return;
    }
    holder_ = {};
    ++current_;
    while (over_.erase(current_) > 0) {
      ++current_;
    }
  }
  changed_.notify_all();
}

void queue_collectives(
    Stream& stream,
    std::span<Communicator* const> groups,
    std::function<void()> work) {
  LaunchOrder::Orders orders = orders_of(groups);
  if (orders.empty()) {
    stream.submit(std::move(work));
    return;
  }
  // A stream that failed skips its work, and drops the turn with it.
  auto turn = std::make_shared<std::optional<LaunchOrder::Turn>>();
  turn->emplace(std::move(orders));
  stream.submit([turn = std::move(turn), work = std::move(work)] {
    (*turn)->begin();
    const auto over = c10::make_scope_exit([&] { turn->reset(); });
    work();
  });
}

}  // namespace flatshard
