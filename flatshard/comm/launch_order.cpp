#include "flatshard/comm/launch_order.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "flatshard/comm/communicator.h"

namespace flatshard {
namespace {

using Turns = std::vector<std::unique_ptr<LaunchOrder::Turn>>;

// All at once: two threads that took turns on the same two groups in turn could
// wait for each other.
std::shared_ptr<Turns> take_turns(std::span<Communicator* const> groups) {
  static std::mutex mutex;
  std::vector<std::shared_ptr<LaunchOrder>> orders;
  for (Communicator* const group : groups) {
    const auto& order = group->launch_order();
    if (order && std::ranges::find(orders, order) == orders.end()) {
      orders.push_back(order);
    }
  }
  auto turns = std::make_shared<Turns>();
  const std::lock_guard lock(mutex);
  for (auto& order : orders) {
    turns->push_back(std::make_unique<LaunchOrder::Turn>(std::move(order)));
  }
  return turns;
}

}  // namespace

LaunchOrder::Turn::Turn(std::shared_ptr<LaunchOrder> order)
    : order_(std::move(order)), number_(order_->take()) {
}

LaunchOrder::Turn::~Turn() {
  order_->end(number_);
}

void LaunchOrder::Turn::begin() {
  order_->begin(number_);
}

bool LaunchOrder::is_mine() const {
  const std::lock_guard lock(mutex_);
  return holder_ == std::this_thread::get_id();
}

std::int64_t LaunchOrder::take() {
  const std::lock_guard lock(mutex_);
  return num_taken_++;
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
  if (std::ranges::none_of(groups, [](const Communicator* group) {
        return group->launch_order() != nullptr;
      })) {
    stream.submit(std::move(work));
    return;
  }
  auto turns = take_turns(groups);
  // A stream that failed skips its work, and drops the turns with it.
  stream.submit([turns = std::move(turns), work = std::move(work)] {
    for (const auto& turn : *turns) {
      turn->begin();
    }
    const auto over = c10::make_scope_exit([&] { turns->clear(); });
    work();
  });
}

}  // namespace flatshard
