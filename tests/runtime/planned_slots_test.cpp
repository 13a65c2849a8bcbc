#include "flatshard/runtime/planned_slots.h"
#include "tests/unit/one_unit.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace flatshard {
namespace {

using testing::one_unit;
using testing::RankContext;
using testing::run_ranks;

constexpr SlotKey kForward{.unit = 0, .role = SlotRole::forward_weights};
constexpr SlotKey kBackward{.unit = 0, .role = SlotRole::backward_weights};
constexpr std::int64_t kNbytes = 1024;

/// Counts plans and uses.
class Counts : public SlotObserver {
 public:
  void slot_acquired(const Unit&, const SlotKey&, const Slot&) override {
    ++acquired;
  }
  void slots_planned(const SlotPlan&, const std::vector<SlotLifetime>&)
      override {
    ++planned;
  }
  int acquired = 0;
  int planned = 0;
};

struct SlotsFixture {
  explicit SlotsFixture(const RankContext& context, bool on_demand = false)
      : unit(one_unit(context, "zero3")),
        counts(std::make_shared<Counts>()),
        stream(make_stream(at::kCPU, "gather")) {
    observers.add(counts);
    slots.emplace(at::kCPU, 1, observers, on_demand);
  }
  /// An all-gather for the forward, its reshard, and a gradient buffer.
  void plan() {
    UnitSpec spec = unit->spec(kNoUnit, {});
    spec.weights_nbytes = {kNbytes};
    const std::vector<Action> actions{
        {.kind = ActionKind::gather, .unit = 0},
        {.kind = ActionKind::await, .unit = 0},
        {.kind = ActionKind::release, .unit = 0}};
    slots->plan(std::vector<UnitSpec>{spec}, actions);
  }
  Slot acquire(const SlotKey& key) {
    Slot slot;
    slots->acquire(*unit, key, kNbytes, stream, slot);
    return slot;
  }
  void release(Slot& slot) { slots->release(slot, {}, stream); }

  std::unique_ptr<Unit> unit;
  RuntimeObservers observers;
  std::shared_ptr<Counts> counts;
  std::shared_ptr<Stream> stream;
  std::optional<PlannedSlots> slots;
};

void with_slots(
    bool on_demand,
    const std::function<void(SlotsFixture&)>& test) {
  run_ranks(2, [&](const RankContext& context) {
    SlotsFixture fixture(context, on_demand);
    test(fixture);
  });
}

TEST(PlannedSlots, AUseHasTheSamePlaceInEachStep) {
  with_slots(false, [](SlotsFixture& f) {
    f.plan();
    EXPECT_EQ(f.slots->pool().arena_nbytes(), kNbytes);
    void* first = nullptr;
    for (int step = 0; step < 2; ++step) {
      Slot slot = f.acquire(kForward);
      EXPECT_EQ(slot.offset, f.slots->places().offset(kForward));
      first = first == nullptr ? slot.data : first;
      EXPECT_EQ(slot.data, first);
      EXPECT_EQ(f.slots->last(0, SlotRole::forward_weights).data, first);
      f.release(slot);
    }
    EXPECT_FALSE(f.slots->should_replan());
    EXPECT_EQ(f.counts->acquired, 2);
    EXPECT_EQ(f.counts->planned, 1);
  });
}

TEST(PlannedSlots, AUseThatThePlanDoesNotHaveAsksForAnotherPlan) {
  with_slots(false, [](SlotsFixture& f) {
    f.plan();
    Slot planned = f.acquire(kForward);
    Slot slot = f.acquire(kBackward);
    EXPECT_LT(slot.offset, 0);
    EXPECT_NE(slot.data, nullptr);
    EXPECT_FALSE(f.slots->should_replan());  // slots are held
    f.release(slot);
    f.release(planned);
    EXPECT_TRUE(f.slots->should_replan());
    f.plan();
    EXPECT_FALSE(f.slots->should_replan());
    EXPECT_EQ(f.slots->num_plans(), 2);
  });
}

TEST(PlannedSlots, OnDemandThereIsNoArena) {
  with_slots(true, [](SlotsFixture& f) {
    f.plan();
    EXPECT_EQ(f.slots->pool().arena_nbytes(), 0);
    Slot slot = f.acquire(kForward);
    EXPECT_LT(slot.offset, 0);
    f.release(slot);
    EXPECT_EQ(f.slots->pool().dynamic_nbytes(), 0);
    EXPECT_FALSE(f.slots->should_replan());
  });
}

}  // namespace
}  // namespace flatshard
