#include "flatshard/group/parameter_placement.h"

#include "flatshard/core/error.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

using ::testing::ElementsAre;

// Each slice gets the gradients of all ranks of the axis, and the mean covers
// only the other ranks.
TEST(Placements, M12_WhatIsCutAlongAnAxisHasTheSumOfItsRanks) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.mesh({{"edp", 2}, {"ep", 2}});
    const auto placement = ParameterPlacement::along(*mesh, "ep", 6);
    EXPECT_THAT(placement.mesh->axis_names(), ElementsAre("edp"));
    EXPECT_EQ(
        placement.grad_divisor.value_or(1) * placement.mesh->size(),
        mesh->size());
    const std::int64_t first = context.rank % 2 * 3;
    EXPECT_EQ(placement.slice, TensorSlice().take(0, 6, {{first, first + 3}}));
    mesh->world().barrier();
  });
}

TEST(Placements, WhatDoesNotDivideIsNamed) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh({{"edp", 1}, {"ep", 2}});
    EXPECT_THAT(
        message_of([&] { ParameterPlacement::along(*mesh, "ep", 5); }),
        ::testing::HasSubstr(
            "5 slices of a parameter do not divide by axis 'ep'"));
    EXPECT_THAT(
        message_of([&] {
          ParameterPlacement::along(*mesh->sub_mesh({"ep"}), "ep", 4);
        }),
        ::testing::HasSubstr("has only the axis 'ep'"));
    mesh->world().barrier();
  });
}

}  // namespace
}  // namespace flatshard::testing
