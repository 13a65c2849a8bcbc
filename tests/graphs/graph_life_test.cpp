#include "flatshard/graphs/graph_life.h"

#include "flatshard/core/error.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace flatshard {
namespace {

std::vector<GraphPhase> phases() {
  std::vector<GraphPhase> all;
  for (int i = 0; i < kNumGraphPhases; ++i) {
    all.push_back(static_cast<GraphPhase>(i));
  }
  return all;
}

// A row for each phase, with the phases that may follow it.
std::string table() {
  std::string text = "| phase | may become |\n|---|---|\n";
  for (const GraphPhase from : phases()) {
    std::string next;
    for (const GraphPhase to : phases()) {
      if (may_follow(from, to)) {
        next += (next.empty() ? "" : ", ") + std::string(to_string(to));
      }
    }
    text += "| " + std::string(to_string(from)) + " | " + next + " |\n";
  }
  return text;
}

TEST(GraphLife, TableOfMoves) {
  EXPECT_EQ(table(), R"(| phase | may become |
|---|---|
| watching | watching, capturing |
| capturing | watching, captured, failed |
| captured | watching, outdated |
| outdated | watching, outdated |
| failed | watching |
)");
}

TEST(GraphLife, AnyOtherMoveIsAnError) {
  // The moves that lead to each phase.
  const auto in = [](GraphPhase phase) {
    auto life = std::make_unique<GraphLife>(GraphOptions{});
    if (phase == GraphPhase::watching) {
      return life;
    }
    life->move_to(GraphPhase::capturing);
    if (phase == GraphPhase::failed) {
      life->move_to(GraphPhase::failed);
    } else if (phase != GraphPhase::capturing) {
      life->move_to(GraphPhase::captured);
    }
    if (phase == GraphPhase::outdated) {
      life->outdate();
    }
    return life;
  };
  for (const GraphPhase from : phases()) {
    for (const GraphPhase to : phases()) {
      const auto life = in(from);
      ASSERT_TRUE(life->is(from));
      if (may_follow(from, to)) {
        life->move_to(to);
        EXPECT_TRUE(life->is(to));
      } else {
        EXPECT_THROW(life->move_to(to), Error);
        EXPECT_TRUE(life->is(from));
      }
    }
  }
}

TEST(GraphLife, ACaptureThatThrowsIsWatchedAgain) {
  GraphLife life{GraphOptions{}};
  {
    const GraphLife::Capturing capturing(life);
    EXPECT_TRUE(life.is(GraphPhase::capturing));
    EXPECT_FALSE(life.replays());
  }
  EXPECT_TRUE(life.is(GraphPhase::watching));
  {
    const GraphLife::Capturing capturing(life);
    life.move_to(GraphPhase::captured);
  }
  EXPECT_TRUE(life.replays());
}

// Steps before the current one count.
TEST(GraphLife, TheWarmUpIsWatched) {
  GraphLife life{GraphOptions{.warmup_steps = 2}};
  for (const bool warm : {false, false, true}) {
    life.step_begins();
    EXPECT_EQ(life.is_warm(), warm);
  }
  life.restart(/*num_steps=*/2);
  EXPECT_FALSE(life.is_warm());
  life.step_begins();
  EXPECT_TRUE(life.is_warm());
}

}  // namespace
}  // namespace flatshard
