#include "flatshard/unit/unit_weights.h"
#include "flatshard/group/weight_write.h"
#include "flatshard/schedule/slot_plan.h"
#include "tests/unit/one_unit.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::one_unit_contents;
using testing::RankContext;
using testing::run_ranks;

TEST(UnitWeights, ASlotHasEachParameterAtItsOffset) {
  run_ranks(2, [](const RankContext& context) {
    const UnitContents contents = one_unit_contents(context, "zero3");
    const UnitWeights weights("unit", contents.groups);
    EXPECT_FALSE(weights.resident());
    EXPECT_FALSE(weights.rests(kComputePlane));
    const std::int64_t nbytes = weights.nbytes(kComputePlane, kWhole);
    EXPECT_GE(nbytes, (8 + 3) * 4);
    EXPECT_EQ(nbytes % SlotPlan::kAlignment, 0);
    const at::Tensor memory = at::full({nbytes / 4}, -1, at::kFloat);
    const SlotView slot{memory.mutable_data_ptr(), nbytes, at::kCPU};
    std::vector<WeightPlanes::Gather> gathers;
    for (const auto& group : contents.groups) {
      gathers.push_back(group->weights().plan_gather());
    }
    weights.gather_into(slot, kComputePlane, kWhole, gathers, {});
    for (const UnitParameter& p : contents.parameters) {
      const std::int64_t begin = weights.offset(p) / 4;
      const std::int64_t numel = p.tensor.numel();
      const at::Tensor expected = p.name == "weight"
                                      ? at::arange(8, at::kFloat)
                                      : at::arange(100, 103, at::kFloat);
      EXPECT_TRUE(memory.narrow(0, begin, numel).equal(expected)) << p.name;
    }
  });
}

TEST(UnitWeights, UnshardedWeightsNeedNoSlot) {
  run_ranks(2, [](const RankContext& context) {
    const UnitContents contents = one_unit_contents(context, "zero1");
    const UnitWeights weights("unit", contents.groups);
    EXPECT_TRUE(weights.resident());
    EXPECT_TRUE(weights.rests(kComputePlane));
    EXPECT_EQ(weights.nbytes(kComputePlane, kWhole), 0);
    EXPECT_EQ(weights.post_forward_nbytes(), 0);
  });
}

TEST(UnitWeights, MorePartsThanAreDistinguishedAreNamed) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](const RankContext& context) {
    const auto mesh = context.mesh();
    std::vector<std::unique_ptr<ParamGroup>> groups;
    for (int g = 0; g < 3; ++g) {
      GroupSpec spec{
          .name = "unit",
          .mesh = mesh,
          .strategy = Strategy::named("zero3", 1)};
      for (int i = 0; i < 24; ++i) {
        const at::Tensor values = at::ones({32, 32});
        spec.parameters.push_back(
            {.names = {fmt::format("weight{}", i)},
             .shape = {32, 32},
             .float8 = Float8Format{.recipe = float8::Recipe::rowwise},
             .values = values,
             .tensor = values.clone().requires_grad_()});
      }
      UnitContents contents =
          make_unit_contents(std::move(spec), {}, Initializer(0));
      std::ranges::move(contents.groups, std::back_inserter(groups));
    }
    const UnitWeights weights("unit", groups);
    for (const auto& parts : weights.planes().part_nbytes) {
      EXPECT_TRUE(parts.empty());
    }
  });
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("unit unit has 72 parts of FP8 weights"));
}

TEST(UnitWeights, EachChangeRaisesTheGeneration) {
  run_ranks(1, [](const RankContext& context) {
    const UnitContents contents = one_unit_contents(context, "zero3");
    const UnitWeights weights("unit", contents.groups);
    const std::int64_t before = weights.generation();
    EXPECT_EQ(weights.generation(), before);
    ParamGroup& group = *contents.groups.front();
    WeightWrite write({&group}, *current_stream(at::kCPU));
    write.end(group, WeightWrite::Cast::here);
    EXPECT_GT(weights.generation(), before);
  });
}

}  // namespace
}  // namespace flatshard
