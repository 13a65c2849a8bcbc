#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace flatshard::nn {

/// Owns one hook: it is removed with the handle, or by `remove()`. `keep()`
/// leaves the hook in the module permanently. May outlive the module.
class [[nodiscard]] HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove)
      : remove_(std::move(remove)) {}
  HookHandle(HookHandle&& other) noexcept
      : remove_(std::exchange(other.remove_, nullptr)) {}
  HookHandle& operator=(HookHandle&& other) noexcept {
    if (this != &other) {
      remove();
      remove_ = std::exchange(other.remove_, nullptr);
    }
    return *this;
  }
  ~HookHandle() { remove(); }

  void remove() {
    if (auto action = std::exchange(remove_, nullptr)) {
      action();
    }
  }
  void keep() { remove_ = nullptr; }

 private:
  std::function<void()> remove_;
};

/// An ordered set of callbacks. Not thread-safe. Adding and removing while the
/// list runs is allowed and takes effect at the next run.
template <class... Args>
class HookList {
 public:
  using Hook = std::function<void(Args...)>;

  /// @param reads_values  false: the hook uses of its arguments only the graph.
  HookHandle add(Hook hook, bool reads_values = true) {
    const std::uint64_t id = state_->next_id++;
    auto hooks = std::make_shared<Entries>(*state_->hooks);
    hooks->push_back({id, std::move(hook), reads_values});
    state_->hooks = std::move(hooks);
    return HookHandle([weak = std::weak_ptr<State>(state_), id] {
      if (const auto state = weak.lock()) {
        auto rest = std::make_shared<Entries>(*state->hooks);
        std::erase_if(*rest, [id](const Entry& e) { return e.id == id; });
        state->hooks = std::move(rest);
      }
    });
  }

  bool empty() const { return state_->hooks->empty(); }
  std::size_t size() const { return state_->hooks->size(); }
  /// Returns whether all hooks read the values of their arguments.
  bool all_read_values() const {
    return std::ranges::all_of(*state_->hooks, &Entry::reads_values);
  }

  /// Runs the hooks in the order of registration.
  template <class... Actual>
  void run(Actual&&... args) const {
    run_some(true, args...);
  }
  /// @param have_values  false: hooks that read the arguments' values do not
  ///   run.
  template <class... Actual>
  void run_some(bool have_values, Actual&&... args) const {
    const auto hooks = state_->hooks;
    for (const Entry& entry : *hooks) {
      if (have_values || !entry.reads_values) {
        entry.hook(args...);
      }
    }
  }

 private:
  struct Entry {
    std::uint64_t id;
    Hook hook;
    bool reads_values;
  };
  using Entries = std::vector<Entry>;
  struct State {
    std::shared_ptr<const Entries> hooks = std::make_shared<Entries>();
    std::uint64_t next_id = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace flatshard::nn
