#pragma once

#include "flatshard/schedule/scheduler.h"
#include "flatshard/schedule/simulate.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard::testing {

// Units with rows, read by forwards and recomputes, and columns, read by
// the rest of a backward. Layers ask for both. docs/guides/fp8.md has the
// table.

inline constexpr PlaneId kRow = 0;
inline constexpr PlaneId kColumn = 1;
inline const std::vector<std::int64_t> kRowParts{512, 256, 256};
inline const std::vector<std::int64_t> kColumnParts{1024, 512, 512};
inline constexpr std::int64_t kAllRows = 1024;
inline constexpr std::int64_t kAllColumns = 2048;
inline constexpr std::int64_t kGrads = 4096;
inline constexpr PartId kNumParts = 3;

enum class Columns { derived, stored };

/// Returns a root without parameters around `n` units of three layers.
inline std::vector<UnitSpec> fp8_units(
    int n,
    Columns columns,
    GatherParts gather_parts = GatherParts::recomputed) {
  std::vector<UnitSpec> units{{.name = "root"}};
  for (int i = 0; i < n; ++i) {
    units.push_back(
        {.name = "b" + std::to_string(i),
         .parent = 0,
         .weights_nbytes = {kAllRows, kAllColumns},
         .grad_nbytes = kGrads,
         .forward_reads = {kRow},
         .backward_reads = {kColumn},
         .derived_from =
             {kStored, columns == Columns::derived ? kRow : kStored},
         .part_nbytes = {kRowParts, kColumnParts},
         .gather_parts = gather_parts,
         .on_request = {kRow, kColumn}});
  }
  return units;
}

/// Returns the events of one step: layers ask for the rows of their parts in
/// forward and for the columns in backward. A backward recomputes `recomputed`
/// first.
inline std::vector<ScheduleEvent> fp8_step(
    const std::vector<UnitSpec>& units,
    const std::vector<PartId>& recomputed = {}) {
  std::vector<int> num_grads(units.size(), 1);
  num_grads[0] = 0;
  std::vector<ScheduleEvent> events;
  for (const ScheduleEvent& event : plain_step_events(units, num_grads)) {
    events.push_back(event);
    const UnitId u = event.unit;
    const auto read = [&](PlaneId plane, PartId part) {
      events.push_back(
          {.kind = EventKind::read, .unit = u, .plane = plane, .part = part});
    };
    if (u > 0 && event.kind == EventKind::forward_begin) {
      for (PartId part = 0; part < kNumParts; ++part) {
        read(kRow, part);
      }
    } else if (u > 0 && event.kind == EventKind::backward_begin) {
      for (const PartId part : recomputed) {
        read(kRow, part);
      }
      for (PartId part = kNumParts - 1; part >= 0; --part) {
        read(kColumn, part);
      }
    }
  }
  return events;
}

/// Returns the actions of a program's second step: the first one teaches it.
inline std::vector<Action> second_step(
    const std::vector<UnitSpec>& units,
    const std::vector<PartId>& recomputed = {},
    int prefetch = 1) {
  Scheduler s(units, {.prefetch = prefetch});
  replay(s, fp8_step(units, recomputed));
  EXPECT_TRUE(s.resting());
  s.on({.kind = EventKind::weights_changed});
  auto actions = replay(s, fp8_step(units, recomputed));
  EXPECT_TRUE(s.resting());
  EXPECT_EQ(s.num_gathered(), 0);
  return actions;
}

inline std::int64_t of_phase(
    const std::vector<UnitSpec>& units,
    std::vector<Action> actions,
    Phase phase) {
  std::erase_if(actions, [&](const Action& a) { return a.phase != phase; });
  return gathered_nbytes(units, actions);
}

}  // namespace flatshard::testing
