#pragma once

#include "flatshard/plan/step.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::plan {

inline constexpr int kNoOperation = -1;

/// The operations of steps in the order in which the host queues them, and the
/// totals of the step that is written at the moment.
class StepRecord {
 public:
  StepRecord() { last_.fill(kNoOperation); }

  /// Resets the totals. @return the first operation of the new step.
  int begin_step();

  /// Appends an operation. @return its number.
  int queue(Operation operation);
  /// Returns the last operation of a stream, else kNoOperation.
  int last(Stream stream) const {
    return last_[static_cast<std::size_t>(stream)];
  }

  /// Lets the next operation of the compute stream wait for this one.
  void compute_waits_for(int operation) {
    if (operation != kNoOperation) {
      compute_waits_.push_back(operation);
    }
  }
  /// Returns the operations that the next compute operation waits for.
  std::vector<int> take_compute_waits() {
    return std::exchange(compute_waits_, {});
  }

  void add_host_seconds(double seconds) { totals_.host_seconds += seconds; }
  void add_kernel_seconds(const std::string& kind, double seconds) {
    totals_.kinds[kind] += seconds;
  }

  /// @param nbytes  negative: freed. These two do not note a peak.
  void add_activations(std::int64_t nbytes) { activations_ += nbytes; }
  void add_gradients(std::int64_t nbytes) { gradients_ += nbytes; }
  /// @param transient  bytes that one node allocates and frees again.
  void note_peak(std::int64_t transient = 0);

  /// Returns the totals of the last step: host, kinds of kernels, memory.
  const StepPlan& totals() const { return totals_; }
  std::vector<Operation> take_operations() { return std::move(operations_); }

 private:
  std::vector<Operation> operations_;
  std::array<int, kNumStreams> last_{};
  std::vector<int> compute_waits_;
  std::int64_t activations_ = 0;
  std::int64_t gradients_ = 0;
  StepPlan totals_;
};

}  // namespace flatshard::plan
