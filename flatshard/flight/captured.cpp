#include "flatshard/flight/captured.h"

#include <exception>
#include <limits>

namespace flatshard {
namespace {

constexpr std::uint32_t kAll = std::numeric_limits<std::uint32_t>::max();

}  // namespace

CapturedCollectives::CapturedCollectives(
    at::Device device,
    std::size_t num_tracks)
    : tracks_(num_tracks), running_(make_stream_word(device)) {
  for (Track& track : tracks_) {
    track.begun = make_stream_word(device);
    track.ended = make_stream_word(device);
  }
}

bool CapturedCollectives::is_over(const Replay& replay) const {
  try {
    return replay.query();
  } catch (const std::exception&) {
    return true;  // nothing runs on a device that failed
  }
}

bool CapturedCollectives::runs(const Replay& replay) {
  while (!replays_.empty() && is_over(*replays_.front())) {
    replays_.pop_front();
  }
  // Before `running_` is set, the words belong to the previous replay.
  return !replays_.empty() && replays_.front().get() == &replay &&
         running_->read() != 0;
}

std::uint32_t CapturedCollectives::num_begun(
    const Replay& replay,
    std::size_t track) {
  if (is_over(replay)) {
    return kAll;
  }
  return runs(replay) ? tracks_[track].begun->read() : 0;
}

std::uint32_t CapturedCollectives::num_ended(
    const Replay& replay,
    std::size_t track) {
  if (is_over(replay)) {
    return kAll;
  }
  return runs(replay) ? tracks_[track].ended->read() : 0;
}

}  // namespace flatshard
