#include "flatshard/group/gather_progress.h"

namespace flatshard {

void GatherProgress::advance(Stream& stream, bool encoded) {
  ++version_;
  if (encoded) {
    encoded_ = version_;
  }
  written_.record(stream);
}

GatherProgress::Step GatherProgress::next(bool by_copies) {
  Step step;
  step.is_first = gathered_ != version_;
  step.encoded = encoded_ == version_;
  gathered_ = version_;
  if (by_copies) {
    step.is_first_copy = copied_ != version_;
    copied_ = version_;
  }
  return step;
}

GatherProgress GatherProgress::forget() {
  GatherProgress forgotten = *this;
  restore(GatherProgress());
  return forgotten;
}

void GatherProgress::restore(const GatherProgress& forgotten) {
  const std::int64_t version = version_;
  *this = forgotten;
  version_ = version;
}

}  // namespace flatshard
