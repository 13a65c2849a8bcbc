#include "flatshard/overlap/block_stages.h"
#include "tests/support/message_of.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace flatshard::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

nn::TensorList pass_on(const nn::TensorList& in) {
  return in;
}

nn::RowRoute no_route() {
  return {};
}

TEST(BlockStages, FollowFromTheEdgesOfTheNodes) {
  nn::Nodes nodes;
  const auto mixed = nodes.add("mix", {0}, 2, {}, pass_on);
  const auto routed = nodes.add("router", mixed, 3, {}, pass_on);
  const auto side = nodes.add("beside", {routed[0]}, 1, {}, pass_on);
  const auto late = nodes.add("late", {mixed[1]}, 1, {}, pass_on);
  const auto rows = nodes.exchange("out", {routed[1], routed[2]}, no_route);
  const auto first = nodes.add("up", rows, 1, {}, pass_on);
  const auto second = nodes.add("down", first, 1, {}, pass_on);
  const auto back = nodes.exchange("back", second, no_route, side[0]);
  nodes.add("add", {back[0], late[0], 0}, 1, {}, pass_on);
  const BlockStages stages(nodes);
  const auto expect_stage = [&](PlanNode node,
                                const std::vector<int>& of,
                                const std::vector<int>& inputs,
                                const std::vector<int>& outputs) {
    EXPECT_EQ(stages.of(node).nodes, of) << to_string(node);
    EXPECT_EQ(stages.of(node).inputs, inputs) << to_string(node);
    EXPECT_EQ(stages.of(node).outputs, outputs) << to_string(node);
  };
  expect_stage(
      PlanNode::attend,
      {0, 1},
      {0},
      {mixed[1], routed[0], routed[1], routed[2]});
  expect_stage(PlanNode::dispatch, {4}, {routed[1], routed[2]}, rows);
  expect_stage(
      PlanNode::shared,
      {2, 3},
      {routed[0], mixed[1]},
      {side[0], late[0]});
  expect_stage(PlanNode::experts, {5, 6}, rows, second);
  // The exchange reads an addend. The addend has no separate gradient there.
  expect_stage(PlanNode::combine, {7}, second, back);
  expect_stage(PlanNode::merge, {8}, {back[0], late[0], 0}, {stages.result()});
  EXPECT_TRUE(stages.is_read(side[0], PlanNode::experts, PlanNode::merge));
  EXPECT_FALSE(stages.is_read(side[0], PlanNode::combine, PlanNode::merge));
  EXPECT_FALSE(stages.is_read(side[0], PlanNode::shared, PlanNode::experts));
}

TEST(BlockStages, ABlockWithoutAnExchangeIsOnePiece) {
  nn::Nodes nodes;
  nodes.add("second", nodes.add("first", {0}, 1, {}, pass_on), 1, {}, pass_on);
  const BlockStages stages(nodes);
  EXPECT_THAT(stages.of(PlanNode::attend).nodes, ElementsAre(0, 1));
  EXPECT_FALSE(stages.has(PlanNode::merge));
}

TEST(BlockStages, NodesThatARecomputeKeepsAreApart) {
  nn::Nodes nodes;
  const auto kept = nodes.add("attention", {0}, 1, {}, pass_on);
  nodes.keep_last();
  const auto rows = nodes.add("router", kept, 1, {}, pass_on);
  nodes.exchange("back", nodes.exchange("out", rows, no_route), no_route);
  const BlockStages stages(nodes);
  EXPECT_THAT(stages.of(BlockStages::kKept).nodes, ElementsAre(0));
  EXPECT_EQ(stages.of(BlockStages::kKept).outputs, kept);
  EXPECT_THAT(stages.of(PlanNode::attend).nodes, ElementsAre(1));
  EXPECT_EQ(stages.of(PlanNode::attend).inputs, kept);
  nodes.add("late", {rows[0]}, 1, {}, pass_on);
  EXPECT_TRUE(BlockStages(nodes).has(PlanNode::shared));
  nn::Nodes late;
  late.exchange("back", late.exchange("out", {0}, no_route), no_route);
  late.keep_last();
  EXPECT_THAT(
      message_of([&] { BlockStages{late}; }),
      HasSubstr("node out of a block in pieces: expected nodes that a "
                "recompute keeps to come before the exchanges"));
}

TEST(BlockStages, OtherExchangesAreNamed) {
  nn::Nodes one;
  one.exchange("out", {0}, no_route);
  EXPECT_THAT(
      message_of([&] { BlockStages{one}; }),
      HasSubstr("got 1 exchanges, 1 of them one after another"));
  nn::Nodes side_by_side;
  side_by_side.exchange("out", {0}, no_route);
  side_by_side.exchange("too", {0}, no_route);
  EXPECT_THAT(
      message_of([&] { BlockStages{side_by_side}; }),
      HasSubstr("got 2 exchanges, 1 of them one after another"));
  nn::Nodes two_results;
  two_results.add("add", {0}, 2, {}, pass_on);
  EXPECT_THAT(
      message_of([&] { BlockStages{two_results}; }),
      HasSubstr("expected its last node to have one output"));
}

TEST(Nodes, RunInTheirOrderAndKeepWhatIsStillRead) {
  nn::Nodes nodes(2);
  const auto sum = nodes.add("sum", {0, 1}, 1, {}, [](const auto& in) {
    return nn::TensorList{in[0] + in[1]};
  });
  nodes.add("product", {sum[0], 0}, 1, {}, [](const auto& in) {
    return nn::TensorList{in[0] * in[1]};
  });
  const at::Tensor two = at::full({1}, 2.0);
  const at::Tensor three = at::full({1}, 3.0);
  const nn::TensorList out = nodes.run({two, three});
  ASSERT_EQ(out.size(), 1U);
  EXPECT_EQ(out[0].item<double>(), 10);
  nn::TensorList values{two, three, {}, {}};
  nodes.run({0}, {sum[0]}, values);
  EXPECT_TRUE(values[sum[0]].defined());
  EXPECT_FALSE(values[0].defined());
}

TEST(Nodes, WrongNumbersAreNamed) {
  nn::Nodes nodes;
  EXPECT_THAT(
      message_of([&] { nodes.add("router", {1}, 1, {}, pass_on); }),
      HasSubstr("node router of a block: expected inputs below 1"));
  EXPECT_THAT(
      message_of([&] { nn::Nodes().run({at::ones({1})}); }),
      HasSubstr("expected one node or more"));
  nodes.add("router", {0}, 2, {}, pass_on);
  EXPECT_THAT(
      message_of([&] { nodes.run({at::ones({1})}); }),
      HasSubstr("node router of a block: expected the 2 outputs"));
}

}  // namespace
}  // namespace flatshard::testing
