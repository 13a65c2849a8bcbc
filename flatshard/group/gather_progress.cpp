#include "flatshard/group/gather_progress.h"

#include <utility>

namespace flatshard {

void GatherProgress::advance(Stream& stream, bool float8_begun) {
  ++version_;
  if (float8_begun) {
    float8_begun_ = version_;
  }
  written_.record(stream);
}

GatherProgress::Step GatherProgress::next(bool by_copies) {
  Step step;
  step.is_first = gathered_ != version_;
  step.float8_begun = float8_begun_ == version_;
  gathered_ = version_;
  if (by_copies) {
    step.is_first_copy = copied_ != version_;
    copied_ = version_;
  }
  return step;
}

GatherProgress::Saved GatherProgress::forget() {
  return {
      .gathered = std::exchange(gathered_, 0),
      .copied = std::exchange(copied_, 0),
      .float8_begun = std::exchange(float8_begun_, 0),
      .written = std::exchange(written_, {})};
}

void GatherProgress::restore(Saved saved) {
  gathered_ = saved.gathered;
  copied_ = saved.copied;
  float8_begun_ = saved.float8_begun;
  written_ = std::move(saved.written);
}

}  // namespace flatshard
