#include "flatshard/plan/step_record.h"

#include <algorithm>

namespace flatshard::plan {

int StepRecord::begin_step() {
  activations_ = 0;
  gradients_ = 0;
  totals_ = {};
  return static_cast<int>(operations_.size());
}

int StepRecord::queue(Operation operation) {
  const int id = static_cast<int>(operations_.size());
  last_[static_cast<std::size_t>(operation.stream)] = id;
  operations_.push_back(std::move(operation));
  return id;
}

void StepRecord::note_peak(std::int64_t transient) {
  totals_.peak_nbytes =
      std::max(totals_.peak_nbytes, activations_ + gradients_ + transient);
  totals_.activation_nbytes = std::max(totals_.activation_nbytes, activations_);
}

}  // namespace flatshard::plan
