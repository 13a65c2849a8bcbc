#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace flatshard::testing {

/// Counts the calls of one ATen operation on all threads. One at a time.
class CountedOperation {
 public:
  /// @param name  with its namespace, "aten::mm".
  explicit CountedOperation(std::string name) {
    name_ = std::move(name);
    count_ = 0;
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(began).scopes({at::RecordScope::FUNCTION}));
  }
  ~CountedOperation() { at::removeCallback(handle_); }
  CountedOperation(const CountedOperation&) = delete;
  CountedOperation& operator=(const CountedOperation&) = delete;

  /// Returns the calls since the last one of `take`.
  std::int64_t take() { return count_.exchange(0); }

 private:
  static std::unique_ptr<at::ObserverContext> began(
      const at::RecordFunction& call) {
    if (name_ == call.name()) {
      ++count_;
    }
    return nullptr;
  }

  static inline std::string name_;
  static inline std::atomic<std::int64_t> count_ = 0;
  at::CallbackHandle handle_ = 0;
};

}  // namespace flatshard::testing
