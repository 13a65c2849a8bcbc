// Activations that calls keep for their backward, in host memory in between.
#include "flatshard/schedule/scheduler.h"

#include <algorithm>
#include <iterator>

namespace flatshard {
namespace {

/// Calls whose kept tensors may be loaded at once: one computes, and the next
/// one arrives.
constexpr int kMaxLoaded = 2;

}  // namespace

std::vector<Scheduler::Kept>::iterator Scheduler::find_kept(CallId call) {
  return std::ranges::find(kept_, call, &Kept::call);
}

// The copy of one call runs during the forward of the next one. At the end of
// that forward its memory is freed. The last call of a forward also stays on
// the device, because none follows.
void Scheduler::download_kept(const ScheduleEvent& event, Actions& out) {
  if (event.kept_nbytes == 0 || !event.needs_backward) {
    return;
  }
  out.push_back(
      {.kind = ActionKind::download,
       .unit = event.unit,
       .call = event.call,
       .nbytes = event.kept_nbytes});
  for (Kept& earlier : kept_) {
    if (earlier.place == Kept::Place::leaving && !earlier.is_read) {
      earlier.place = Kept::Place::host;
      out.push_back(
          {.kind = ActionKind::drain_download,
           .unit = earlier.unit,
           .call = earlier.call});
    }
  }
  kept_.push_back(
      {.unit = event.unit, .call = event.call, .nbytes = event.kept_nbytes});
}

void Scheduler::load(Kept& kept, Actions& out) {
  if (kept.place == Kept::Place::host) {
    kept.place = Kept::Place::loaded;
    out.push_back(
        {.kind = ActionKind::upload,
         .unit = kept.unit,
         .call = kept.call,
         .nbytes = kept.nbytes});
  }
}

void Scheduler::load_for_backward(CallId call, Actions& out) {
  const auto kept = find_kept(call);
  if (kept == kept_.end()) {
    return;
  }
  load(*kept, out);
  const auto num_loaded =
      std::ranges::count(kept_, Kept::Place::loaded, &Kept::place);
  const auto next = std::find_if(
      std::make_reverse_iterator(kept),
      kept_.rend(),
      [](const Kept& earlier) { return earlier.place == Kept::Place::host; });
  if (next != kept_.rend() && num_loaded < kMaxLoaded) {
    load(*next, out);
  }
}

void Scheduler::kept_read(const ScheduleEvent& event, Actions& out) {
  const auto kept = find_kept(event.call);
  if (kept == kept_.end()) {
    return;  // it never left the device
  }
  load(*kept, out);
  if (kept->place == Kept::Place::loaded && !kept->is_read) {
    out.push_back(
        {.kind = ActionKind::await_upload,
         .unit = kept->unit,
         .call = kept->call});
  }
  kept->is_read = true;
}

void Scheduler::kept_done(const ScheduleEvent& event, Actions& out) {
  const auto kept = find_kept(event.call);
  if (kept != kept_.end()) {
    out.push_back(
        {.kind = ActionKind::release_kept,
         .unit = kept->unit,
         .call = kept->call});
    kept_.erase(kept);
  }
}

}  // namespace flatshard
