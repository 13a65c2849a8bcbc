#include "flatshard/flight/ring.h"

#include <algorithm>
#include <functional>

namespace flatshard::detail {
namespace {

// Ranks compare hashes at multiples of this; enough of them are kept for hosts
// that queue a thousand collectives ahead of each other.
constexpr std::int64_t kCheckpointEvery = 64;
constexpr std::size_t kNumCheckpoints = 16;

// FNV-1a: the same on every machine. std::hash does not guarantee this.
std::uint64_t mix(std::uint64_t hash, std::string_view bytes) {
  for (const char c : bytes) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

std::uint64_t mix(std::uint64_t hash, const CollectiveSignature& s) {
  const std::int64_t numbers[] = {
      static_cast<std::int64_t>(s.kind),
      s.numel,
      static_cast<std::int64_t>(s.dtype),
      s.detail};
  hash =
      mix(hash ^ 0xcbf29ce484222325ULL,
          {reinterpret_cast<const char*>(numbers), sizeof(numbers)});
  return mix(hash, s.unit);
}

std::int64_t ms(std::chrono::steady_clock::duration time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
}

}  // namespace

int FlightRing::add_track(
    std::string group,
    std::string name,
    std::shared_ptr<LaunchOrder> order) {
  const std::lock_guard lock(mutex_);
  auto track = std::make_unique<Track>();
  track->group = std::move(group);
  track->name = std::move(name);
  track->order = std::move(order);
  track->slots.resize(capacity_);
  tracks_.push_back(std::move(track));
  return static_cast<int>(tracks_.size()) - 1;
}

FlightRing::Slot& FlightRing::append(
    Track& track,
    CollectiveSignature signature,
    std::int64_t step) const {
  const std::int64_t seq = track.num_launched++;
  track.hash = mix(track.hash, signature);
  if (track.num_launched % kCheckpointEvery == 0) {
    track.checkpoints.push_back({track.num_launched, track.hash});
    if (track.checkpoints.size() > kNumCheckpoints) {
      track.checkpoints.pop_front();
    }
  }
  Slot& s = slot(track, seq);
  s.signature = std::move(signature);
  s.step = step;
  s.launched_at = Clock::now();
  s.on_stream = false;
  s.captured.reset();
  s.replay.reset();
  return s;
}

FlightRecorder::Ticket FlightRing::begin(
    int track_index,
    CollectiveSignature signature,
    std::int64_t step) {
  FlightRecorder::Ticket ticket{track_index, 0, step};
  Event before;
  std::shared_ptr<CapturedCollectives> captured;
  {
    const std::lock_guard lock(mutex_);
    captured = captured_;
  }
  if (captured && (device_.is_cpu() || current_stream_records(device_))) {
    CapturedCollectives::Track& track = captured->tracks_[track_index];
    ticket.captured = true;
    track.signatures.push_back(std::move(signature));
    ticket.seq = static_cast<std::int64_t>(track.signatures.size());
    track.begun->write(static_cast<std::uint32_t>(ticket.seq));
    return ticket;
  }
  {
    const std::lock_guard lock(mutex_);
    Track& track = *tracks_[track_index];
    ticket.seq = track.num_launched;
    std::swap(before, append(track, std::move(signature), step).before);
  }
  if (device_.is_cuda()) {
    before.record(*current_stream(device_));
    const std::lock_guard lock(mutex_);
    slot(*tracks_[track_index], ticket.seq).before = std::move(before);
  }
  return ticket;
}

void FlightRing::launched(FlightRecorder::Ticket ticket) {
  Event after;
  std::shared_ptr<CapturedCollectives> captured;
  {
    const std::lock_guard lock(mutex_);
    if (ticket.captured) {
      captured = captured_;
    } else {
      std::swap(after, slot(*tracks_[ticket.track], ticket.seq).after);
    }
  }
  if (ticket.captured) {
    captured->tracks_[ticket.track].ended->write(
        static_cast<std::uint32_t>(ticket.seq));
    return;
  }
  after.record(*current_stream(device_));
  const std::lock_guard lock(mutex_);
  Slot& s = slot(*tracks_[ticket.track], ticket.seq);
  s.after = std::move(after);
  s.on_stream = true;
}

// -- graphs ------------------------------------------------------------------

std::shared_ptr<CapturedCollectives> FlightRing::make_captured() {
  std::size_t num_tracks = 0;
  {
    const std::lock_guard lock(mutex_);
    num_tracks = tracks_.size();
  }
  return std::make_shared<CapturedCollectives>(device_, num_tracks);
}

void FlightRing::begin_capture(std::shared_ptr<CapturedCollectives> captured) {
  captured->running_->write(1);
  const std::lock_guard lock(mutex_);
  captured_ = std::move(captured);
}

void FlightRing::end_capture(bool failed) {
  std::shared_ptr<CapturedCollectives> captured;
  {
    const std::lock_guard lock(mutex_);
    captured.swap(captured_);
  }
  if (captured && !failed) {
    captured->running_->write(0);
    for (const CapturedCollectives::Track& track : captured->tracks_) {
      if (!track.signatures.empty()) {  // the others' are never written
        track.begun->write(0);
        track.ended->write(0);
      }
    }
  }
}

void FlightRing::grow(Track& track, std::int64_t capacity) {
  std::vector<Slot> slots(static_cast<std::size_t>(capacity));
  const std::int64_t oldest = std::max<std::int64_t>(
      0,
      track.num_launched - FlightRing::capacity(track));
  for (std::int64_t seq = oldest; seq < track.num_launched; ++seq) {
    slots[seq % capacity] = std::move(slot(track, seq));
  }
  track.slots = std::move(slots);
}

void FlightRing::replayed(
    const std::shared_ptr<CapturedCollectives>& captured,
    std::int64_t step,
    Event done) {
  const auto replay =
      std::make_shared<const CapturedCollectives::Replay>(std::move(done));
  const std::lock_guard lock(mutex_);
  captured->replays_.push_back(replay);
  for (std::size_t i = 0; i < captured->tracks_.size(); ++i) {
    Track& track = *tracks_[i];
    const auto& signatures = captured->tracks_[i].signatures;
    // The ring keeps two replays in full. The host may be that far ahead.
    const auto needed = static_cast<std::int64_t>(2 * signatures.size());
    if (needed > capacity(track)) {
      grow(track, needed);
    }
    for (std::uint32_t index = 0; index < signatures.size(); ++index) {
      Slot& s = append(track, signatures[index], step);
      s.captured = captured;
      s.replay = replay;
      s.index = index;
      s.on_stream = true;
    }
  }
}

void FlightRing::completed(FlightRecorder::Ticket ticket) {
  const std::lock_guard lock(mutex_);
  Track& track = *tracks_[ticket.track];
  slot(track, ticket.seq).completed_at = Clock::now();
  track.num_completed = ticket.seq + 1;
}

// Collectives of one communicator complete in order.
void FlightRing::poll(std::size_t index) {
  Track& track = *tracks_[index];
  track.num_completed =
      std::max(track.num_completed, track.num_launched - capacity(track));
  while (track.num_completed < track.num_launched) {
    Slot& s = slot(track, track.num_completed);
    if (!s.on_stream) {
      return;
    }
    try {
      if (s.replay ? s.captured->num_ended(*s.replay, index) <= s.index
                   : !s.after.query()) {
        return;
      }
    } catch (const std::exception&) {
      // The device failed: nothing runs there any more, and the training thread
      // gets that error itself.
    }
    s.completed_at = Clock::now();
    s.captured.reset();
    s.replay.reset();
    ++track.num_completed;
  }
}

FlightEntry FlightRing::entry(std::size_t index, std::int64_t seq) const {
  Track& track = *tracks_[index];
  Slot& s = slot(track, seq);
  FlightEntry entry{.seq = seq, .signature = s.signature, .step = s.step};
  const auto now = Clock::now();
  if (seq < track.num_completed) {
    entry.state = CollectiveState::completed;
    entry.age_ms = ms(now - s.completed_at);
    return entry;
  }
  entry.age_ms = ms(now - s.launched_at);
  entry.state = CollectiveState::started;
  if (s.replay) {
    entry.state = s.captured->num_begun(*s.replay, index) > s.index &&
                          seq == track.num_completed
                      ? CollectiveState::started
                      : CollectiveState::scheduled;
  } else if (device_.is_cuda()) {
    // It waits for another collective or for work that has not ended.
    bool reached = false;
    try {
      reached = s.before.recorded() && s.before.query();
    } catch (const std::exception&) {}
    entry.state = reached && seq == track.num_completed
                      ? CollectiveState::started
                      : CollectiveState::scheduled;
  }
  return entry;
}

std::vector<FlightTrack> FlightRing::tracks(int num_entries) {
  const std::lock_guard lock(mutex_);
  LaunchOrder::Orders orders;
  for (const auto& track : tracks_) {
    orders.push_back(track->order);
  }
  const std::vector<std::int64_t> taken = LaunchOrder::num_taken(orders);
  std::vector<FlightTrack> result;
  for (std::size_t index = 0; index < tracks_.size(); ++index) {
    Track& track = *tracks_[index];
    poll(index);
    FlightTrack out{
        track.group,
        track.name,
        track.num_launched,
        track.order ? taken[index] : track.num_launched,
        {track.checkpoints.begin(), track.checkpoints.end()},
        {}};
    const std::int64_t oldest =
        std::max<std::int64_t>(0, track.num_launched - capacity(track));
    const std::int64_t first =
        std::max(oldest, track.num_launched - num_entries);
    if (track.num_completed < first) {
      out.entries.push_back(entry(index, track.num_completed));
    }
    for (std::int64_t seq = first; seq < track.num_launched; ++seq) {
      out.entries.push_back(entry(index, seq));
    }
    result.push_back(std::move(out));
  }
  return result;
}

}  // namespace flatshard::detail
