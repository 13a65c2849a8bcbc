// Kept activations of calls are copied to the host and back.
#include "flatshard/schedule/scheduler.h"

#include "flatshard/schedule/simulate.h"
#include "tests/schedule/blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

using testing::blocks;
using enum EventKind;

std::string only_kept(std::vector<Action> actions) {
  std::erase_if(actions, [](const Action& action) { return action.call < 0; });
  return to_string(actions);
}

TEST(Kept, GoldenStep) {
  Scheduler scheduler(blocks(4), {.prefetch = 1});
  EXPECT_EQ(
      to_string(replay(
          scheduler,
          plain_step_events(blocks(4), {0, 1, 1, 1, 1}, {0, 10, 10, 10, 10}))),
      // forward: a copy has the next unit's forward to finish
      "gather(1) gather(2) await(1) release(1) download(1) "
      "gather(3) await(2) release(2) download(2) drain_download(1) "
      "gather(4) await(3) release(3) download(3) drain_download(2) "
      "await(4) download(4) drain_download(3) "
      // backward: unit 4 is on the device, 3 arrives during its backward
      "gather'(3) upload(3) acquire_grads(4) release_kept(4) release(4) "
      "gather'(2) upload(2) await(3) reduce(4) acquire_grads(3) "
      "await_upload(3) release_kept(3) release(3) "
      "gather'(1) upload(1) await(2) reduce(3) drain(4) acquire_grads(2) "
      "await_upload(2) release_kept(2) release(2) "
      "await(1) reduce(2) drain(3) acquire_grads(1) "
      "await_upload(1) release_kept(1) release(1) "
      "reduce(1) drain(2) drain(1) join");
}

TEST(Kept, ForwardWithoutBackwardDownloadsNothing) {
  Scheduler scheduler(blocks(2), {});
  auto events = plain_step_events(blocks(2), {0, 1, 1}, {0, 10, 10});
  events.erase(
      std::ranges::find(events, task_begin, &ScheduleEvent::kind),
      events.end());
  for (ScheduleEvent& event : events) {
    event.needs_backward = false;
  }
  EXPECT_EQ(only_kept(replay(scheduler, events)), "");
  EXPECT_TRUE(scheduler.resting());
}

TEST(Kept, L7_ResetReleasesEverything) {
  Scheduler scheduler(blocks(3), {});
  const auto events = plain_step_events(blocks(3), {0, 1, 1, 1}, {0, 9, 9, 9});
  const auto in_backward = std::ranges::find_if(events, [](const auto& event) {
    return event.kind == kept_read && event.unit == 2;
  });
  replay(scheduler, {events.begin(), in_backward});
  EXPECT_EQ(
      only_kept(scheduler.on({.kind = reset})),
      "release_kept(1) release_kept(2)");
  // The next step is complete, and calls that the reset dropped are ignored.
  EXPECT_EQ(scheduler.on({.kind = kept_done, .unit = 1, .call = 1}).size(), 0U);
  Scheduler fresh(blocks(3), {});
  EXPECT_EQ(
      only_kept(replay(scheduler, events)),
      only_kept(replay(fresh, events)));
}

// The life of what one call keeps, as the executor carries it out.
struct Life {
  bool on_device = true;
  bool on_host = false;
  bool loaded = false;
  bool awaited = false;
};

// Random models and random orders of backwards. Kernels read what is on the
// device, no memory is freed before its copy, and in the end nothing is left.
// At most two calls are loaded at once, except for calls whose backward starts
// in another order than the reverse of the forwards.
TEST(Kept, L6_RandomStepsReadWhatIsThere) {
  std::mt19937 random(7);
  const auto draw = [&](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  for (int trial = 0; trial < 300; ++trial) {
    const int n = 1 + draw(6);
    const int microbatches = 1 + draw(3);
    const bool nested = draw(2) == 0;
    Scheduler scheduler(blocks(n), {.prefetch = draw(3)});
    std::map<CallId, Life> lives;
    std::ptrdiff_t most_loaded = 0;
    const auto num_loaded = [&] {
      return std::ranges::count_if(lives, [](const auto& life) {
        return life.second.loaded;
      });
    };
    const auto carry_out = [&](const ScheduleEvent& event) {
      for (const Action& action : scheduler.on(event)) {
        switch (action.kind) {
          case ActionKind::download:
            EXPECT_FALSE(lives.contains(action.call));
            EXPECT_GT(action.nbytes, 0);
            lives[action.call].on_host = true;
            break;
          case ActionKind::drain_download:
            EXPECT_TRUE(lives.at(action.call).on_host);
            EXPECT_TRUE(std::exchange(lives.at(action.call).on_device, false));
            break;
          case ActionKind::upload:
            EXPECT_FALSE(lives.at(action.call).on_device);
            EXPECT_FALSE(std::exchange(lives.at(action.call).loaded, true));
            if (action.call != event.call) {  // ahead of its backward
              EXPECT_LE(num_loaded(), 2);
            }
            break;
          case ActionKind::await_upload:
            EXPECT_TRUE(lives.at(action.call).loaded);
            EXPECT_FALSE(std::exchange(lives.at(action.call).awaited, true));
            break;
          case ActionKind::release_kept:
            EXPECT_EQ(lives.erase(action.call), 1U);
            break;
          default:
            break;
        }
        most_loaded = std::max(most_loaded, num_loaded());
      }
    };
    const CallId stride = n + 1;
    for (int m = 0; m < microbatches; ++m) {
      for (UnitId u = 1; u <= n; ++u) {
        carry_out({.kind = forward_begin, .unit = u, .call = m * stride + u});
        carry_out(
            {.kind = forward_end,
             .unit = u,
             .call = m * stride + u,
             .needs_backward = true,
             .kept_nbytes = draw(4) == 0 ? 0 : 1 + draw(9)});
      }
    }
    std::vector<int> order(microbatches);
    for (int m = 0; m < microbatches; ++m) {
      order[m] = microbatches - 1 - m;
    }
    if (!nested) {
      std::ranges::shuffle(order, random);
    }
    for (const int m : order) {
      ScheduleEvent begin{.kind = task_begin, .task = m};
      for (UnitId u = 1; u <= n; ++u) {
        begin.calls.emplace_back(u, 1);
        begin.expected.emplace_back(u, 1);
      }
      carry_out(begin);
      for (UnitId u = n; u >= 1; --u) {
        const CallId call = m * stride + u;
        const auto event = [&](EventKind kind) {
          carry_out({.kind = kind, .unit = u, .call = call, .task = m});
        };
        event(backward_begin);
        const bool reads = lives.contains(call);
        event(kept_read);
        if (reads) {
          const Life& life = lives.at(call);
          EXPECT_TRUE(life.on_device || (life.loaded && life.awaited));
        }
        event(wgrad_done);
        event(kept_done);
        event(inputs_done);
        EXPECT_FALSE(lives.contains(call));
      }
      carry_out({.kind = task_end, .task = m, .outermost = true});
    }
    EXPECT_TRUE(lives.empty());
    if (nested) {
      EXPECT_LE(most_loaded, 2);
    }
  }
}

}  // namespace
}  // namespace flatshard
