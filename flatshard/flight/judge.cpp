// The part of FlightWatcher that reads the states of the other ranks and finds
// the verdict.
#include <algorithm>

#include "flatshard/flight/watcher.h"

namespace flatshard::detail {

namespace {

// It waits in a collective in which it waited before.
bool still_waits(const FlightState& a, const FlightState& b) {
  return std::any_of(a.tracks.begin(), a.tracks.end(), [&](const auto& track) {
    const FlightEntry* waited = track.pending();
    const FlightTrack* now = b.find(track.group);
    return waited != nullptr && now != nullptr && now->pending() != nullptr &&
           now->pending()->seq == waited->seq;
  });
}

}  // namespace

void FlightWatcher::take(RankView& view, FlightState state) {
  if (view.seen && state.beat != view.state.beat) {
    view.waits = still_waits(view.state, state);
  }
  view.state = std::move(state);
  view.seen = true;
}

void FlightWatcher::read(int rank) {
  const std::string text = ask([&] { return store_->get_to_str(key(rank)); });
  RankView& view = views_[rank];
  FlightState state = parse_flight_state(text);
  if (!view.seen || state.beat != view.state.beat) {
    last_beat_[rank] = Clock::now();
  }
  take(view, std::move(state));
  view.silent =
      std::chrono::duration_cast<Milliseconds>(Clock::now() - last_beat_[rank]);
  if (rank == 0) {
    const std::lock_guard lock(mutex_);
    leader_ = view.state;
  }
}

void FlightWatcher::read_all() {
  for (int r = 0; r < world_; ++r) {
    if (r != rank_) {
      read(r);
    }
  }
}

bool FlightWatcher::is_missing(int rank) {
  RankView& view = views_[rank];
  const auto at_work = [&] {
    return view.state.status == RankStatus::running ||
           view.state.status == RankStatus::troubled;
  };
  if (!at_work()) {
    return false;
  }
  view.process = process_state(view.state);
  if (view.process == ProcessState::gone) {
    read(rank);  // it may have left normally since
    return at_work();
  }
  if (view.silent >= stalled_after_) {
    return true;
  }
  return trouble_ && view.process != ProcessState::running &&
         view.silent >= settle_;
}

bool FlightWatcher::stalled() const {
  return std::any_of(views_.begin(), views_.end(), [&](const RankView& view) {
    return std::any_of(
        view.state.tracks.begin(),
        view.state.tracks.end(),
        [&](const FlightTrack& track) {
          const FlightEntry* entry = track.pending();
          return entry != nullptr && entry->age_ms >= stalled_after_.count();
        });
  });
}

bool FlightWatcher::dumps_are_here() {
  return std::all_of(views_.begin(), views_.end(), [&](const RankView& view) {
    return view.state.status == RankStatus::left ||
           view.state.dump == dump_request_;
  });
}

// A missing rank is detected before the others have reached the collective that
// it blocks. The verdict names what they do, so wait until they get there.
bool FlightWatcher::others_wait() {
  if (!missing_since_) {
    missing_since_ = Clock::now();
    for (RankView& view : views_) {
      view.waits = false;
    }
  }
  return Clock::now() - *missing_since_ >= settle_ ||
         std::all_of(views_.begin(), views_.end(), [](const RankView& view) {
           return view.missing || view.waits ||
                  view.state.status == RankStatus::left;
         });
}

void FlightWatcher::judge() {
  read_all();
  trouble_ = std::any_of(views_.begin(), views_.end(), [](const RankView& v) {
    return v.state.status == RankStatus::troubled;
  });
  bool missing = false;
  bool failed = false;
  for (int r = 0; r < world_; ++r) {
    views_[r].missing = r != rank_ && is_missing(r);
    missing = missing || views_[r].missing;
    failed = failed || views_[r].state.status == RankStatus::failed;
  }
  if (failed || missing) {
    if (failed || others_wait()) {
      write_verdict(diagnose(views_, stalled_after_));
    }
    return;
  }
  missing_since_.reset();
  if (!trouble_ && !stalled() && !checkpoints_differ(views_) &&
      !programs_part(views_) && !waits_for_who_left(views_)) {
    if (suspicious_since_) {
      suspicious_since_.reset();
      ask([&] { store_->set("dump", std::string("0")); });
    }
    return;
  }
  if (!suspicious_since_) {
    suspicious_since_ = Clock::now();
    ask([&] { store_->set("dump", std::to_string(++num_dumps_)); });
    return;
  }
  // After a failed collective the rank that caused it may yet fall silent.
  const auto waited = Clock::now() - *suspicious_since_;
  if (waited < settle_ + 2 * tick_ && (trouble_ || !dumps_are_here())) {
    return;
  }
  write_verdict(diagnose(views_, stalled_after_));
}

// Without the store this rank has only its own state and rank 0's last message.
Verdict FlightWatcher::store_verdict(const std::string& what, ErrorCode code) {
  std::vector<RankView> views(2);
  views[1].state = state(kNumEntries);
  {
    const std::lock_guard lock(mutex_);
    views[0].state = leader_;
  }
  views[0].seen = views[1].seen = true;
  views[0].missing = true;
  views[0].process = process_state(views[0].state);
  const FlightState& leader = views[0].state;
  const std::string_view process =
      views[0].process == ProcessState::gone      ? "has ended"
      : views[0].process == ProcessState::stopped ? "is stopped by a signal"
      : views[0].process == ProcessState::running
          ? "still runs"
          : "may have ended, or its host cannot be reached";
  const std::string doing = views[1].state.tracks.empty()
                                ? std::string()
                                : "\n" + flight_table(views, {});
  if (rank_ == 0 || (options_.launcher_serves_store &&
                     views[0].process == ProcessState::running)) {
    return {
        code,
        0,
        fmt::format(
            "the store {}; it is served by {}{}",
            what,
            options_.launcher_serves_store ? "the launcher" : "rank 0",
            doing)};
  }
  return {
      code,
      1,
      fmt::format(
          "rank 0 of {} is missing: the store served by {} {}; process {} of "
          "rank 0 on host {} {}{}",
          world_,
          options_.launcher_serves_store ? "its launcher" : "it",
          what,
          leader.pid,
          leader.host,
          process,
          doing)};
}

}  // namespace flatshard::detail
