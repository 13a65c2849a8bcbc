#include "flatshard/diagnostics/overlap_check.h"

#include "flatshard/core/error.h"
#include "tests/runtime/twin.h"

#include <ATen/ATen.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string memory_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::memory) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

TEST(OverlapCheck, RangesThatShareAByteAreNamed) {
  check_disjoint({}, "nowhere");
  check_disjoint({{"a", 0, 8}, {"b", 8, 16}, {"c", 16, 16}, {"d", 4, 4}}, "x");
  EXPECT_THAT(
      memory_error([] {
        check_disjoint({{"b", 15, 20}, {"a", 0, 16}}, "the slot");
      }),
      HasSubstr("the slot: a [0x0, 0x10) and b [0xf, 0x14) overlap"));
  // c is inside a, and b follows.
  EXPECT_THAT(
      memory_error([] {
        check_disjoint({{"a", 0, 100}, {"b", 100, 110}, {"c", 90, 95}}, "x");
      }),
      HasSubstr("a [0x0, 0x64) and c"));
}

TEST(OverlapCheck, PlansThatPutTwoInOnePlaceAreRefused) {
  const PlacedUse a{"a", 0, 4, 0, 256};
  check_placement(
      {a, {"later", 4, 6, 0, 256}, {"beside", 0, 4, 256, 256}},
      512);
  EXPECT_THAT(
      memory_error([&] {
        check_placement({a, {"b", 3, 5, 128, 256}}, 512);
      }),
      HasSubstr("the plan lets a (bytes [0, 256)) and b (bytes [128, 384)) "
                "share a place at the same time"));
  EXPECT_THAT(
      memory_error([&] { check_placement({a}, 255); }),
      HasSubstr("puts a at bytes [0, 256) of an arena of 255"));
}

TEST(OverlapCheck, ASlotThatIsTakenTwice) {
  run_ranks(2, [](RankContext& context) {
    Twin twin(context, {}, {.strategy = "zero3"});
    const auto check = OverlapCheck::install(twin.runtime);
    const auto& units = twin.runtime->units();
    std::array<std::uint8_t, 64> memory{};
    const Slot first{.data = memory.data(), .offset = 0, .nbytes = 32};
    const Slot second{.data = memory.data() + 16, .offset = 16, .nbytes = 32};
    const SlotKey weights{.unit = 1, .role = SlotRole::forward_weights};
    const SlotKey gradients{.unit = 2, .role = SlotRole::gradients};
    check->slot_acquired(*units[1], weights, first);
    EXPECT_THAT(
        memory_error(
            [&] { check->slot_acquired(*units[2], gradients, second); }),
        AllOf(
            HasSubstr("the gradients of unit cell1 got bytes"),
            HasSubstr("the weights for the forward of unit cell0 owns")));
    check->slot_released(*units[1], first);
    check->slot_acquired(*units[2], gradients, second);
    EXPECT_THAT(
        memory_error([&] { check->slot_released(*units[1], first); }),
        HasSubstr("unit cell0 released a slot that it did not own"));
  });
}

TEST(OverlapCheck, AParameterOutsideOfItsSlot) {
  run_ranks(2, [](RankContext& context) {
    Twin twin(context, {}, {.strategy = "zero3"});
    const auto check = OverlapCheck::install(twin.runtime);
    Unit& unit = *twin.runtime->units()[1];
    const at::Tensor slot = at::empty(
        {unit.weights().nbytes(kComputePlane, kWhole)},
        at::TensorOptions(at::kByte));
    const SlotView view{
        .data = slot.data_ptr(),
        .nbytes = unit.weights().nbytes(kComputePlane, kWhole)};
    unit.pointers().point_at(view);
    check->parameters_pointed(unit, view);
    UnitParameter& first = unit.parameters()[0];
    UnitParameter& second = unit.parameters()[1];
    first.storage.point_at(second.tensor.data_ptr());
    EXPECT_THAT(
        memory_error([&] { check->parameters_pointed(unit, view); }),
        AllOf(
            HasSubstr(first.name),
            HasSubstr(second.name),
            HasSubstr("overlap")));
    std::vector<float> elsewhere(1000);
    first.storage.point_at(elsewhere.data());
    EXPECT_THAT(
        memory_error([&] { check->parameters_pointed(unit, view); }),
        AllOf(HasSubstr(first.name), HasSubstr("outside the slot")));
    unit.pointers().clear();
  });
}

TEST(OverlapCheck, TrainingPassesAlsoWhenThePlanChanges) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    OverlapCheck::install(twin.runtime);
    twin.step(forward_backward);
    // Another way through the model: dynamic slots, then a new plan.
    twin.step([](Lab& model, const Twin& t, int rank) {
      const at::Tensor a = model(t.input(rank, 0));
      const at::Tensor b = model(t.input(rank, 1));
      t.backward(a + b);
    });
    twin.step(forward_backward);
    twin.step(forward_backward);
  });
}

TEST(OverlapCheck, IsInstalledAtRest) {
  run_ranks(2, [](RankContext& context) {
    Twin twin(context, {}, {.strategy = "zero3"});
    twin.sharded(twin.input(context.rank));
    EXPECT_THROW(OverlapCheck::install(twin.runtime), Error);
  });
}

}  // namespace
}  // namespace flatshard::testing
