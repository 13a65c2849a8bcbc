#pragma once

#include <cstdint>
#include <string_view>

namespace flatshard {

/// Labels the collectives that this thread launches with their purpose, as long
/// as it exists. It is a label on a call, read on the same thread.
class CollectiveScope {
 public:
  CollectiveScope(std::int64_t step, std::string_view unit);
  /// The observer sets the step.
  explicit CollectiveScope(std::string_view unit) : CollectiveScope(-1, unit) {}
  ~CollectiveScope();
  CollectiveScope(const CollectiveScope&) = delete;
  CollectiveScope& operator=(const CollectiveScope&) = delete;

  /// Returns the innermost of this thread; null: none.
  static const CollectiveScope* current();
  std::int64_t step() const { return step_; }
  std::string_view unit() const { return unit_; }

 private:
  const CollectiveScope* outer_;
  std::int64_t step_;
  std::string_view unit_;
};

}  // namespace flatshard
