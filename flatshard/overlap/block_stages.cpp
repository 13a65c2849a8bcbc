#include "flatshard/overlap/block_stages.h"

#include "flatshard/core/error.h"

#include <algorithm>
#include <cstddef>

namespace flatshard {
namespace {

std::vector<int> read_by(const nn::Node& node) {
  std::vector<int> values = node.inputs;
  if (node.addend >= 0) {
    values.push_back(node.addend);
  }
  return values;
}

void add_once(std::vector<int>& to, int value) {
  if (std::ranges::find(to, value) == to.end()) {
    to.push_back(value);
  }
}

/// Returns the node of a plan for each node of a block.
std::vector<PlanNode> plan_nodes(const nn::Nodes& nodes) {
  const auto& list = nodes.list();
  // Number of exchanges that each node depends on, itself included.
  std::vector<int> depths;
  std::vector<bool> feeds_dispatch(list.size(), false);
  int num_exchanges = 0;
  for (const nn::Node& node : list) {
    int depth = 0;
    for (const int value : read_by(node)) {
      const int maker = nodes.maker_of(value);
      depth = std::max(depth, maker < 0 ? 0 : depths[maker]);
    }
    depths.push_back(depth + (node.is_exchange() ? 1 : 0));
    num_exchanges += node.is_exchange() ? 1 : 0;
  }
  const int deepest = *std::ranges::max_element(depths);
  FLATSHARD_CHECK(
      num_exchanges == deepest && (deepest == 0 || deepest == 2),
      usage,
      "a block in pieces: expected no exchange, or a dispatch and a combine of "
      "rows that depend on it, got {} exchanges, {} of them one after another",
      num_exchanges,
      deepest);
  for (std::size_t i = list.size(); i-- > 0;) {
    const bool is_dispatch = list[i].is_exchange() && depths[i] == 1;
    if (deepest == 0 || is_dispatch || feeds_dispatch[i]) {
      feeds_dispatch[i] = true;
      for (const int value : read_by(list[i])) {
        const int maker = nodes.maker_of(value);
        if (maker >= 0 && (deepest == 0 || depths[maker] == 0)) {
          feeds_dispatch[maker] = true;
        }
      }
    }
  }
  const auto last_kept =
      std::ranges::find_if(list.rbegin(), list.rend(), &nn::Node::is_kept);
  const auto num_kept = static_cast<std::size_t>(list.rend() - last_kept);
  std::vector<PlanNode> found;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (i < num_kept) {
      FLATSHARD_CHECK(
          depths[i] == 0,
          usage,
          "node {} of a block in pieces: expected nodes that a recompute keeps "
          "to come before the exchanges",
          list[i].name);
      found.push_back(BlockStages::kKept);
    } else if (list[i].is_exchange()) {
      found.push_back(depths[i] == 1 ? PlanNode::dispatch : PlanNode::combine);
    } else if (depths[i] == 0) {
      found.push_back(feeds_dispatch[i] ? PlanNode::attend : PlanNode::shared);
    } else {
      found.push_back(depths[i] == 1 ? PlanNode::experts : PlanNode::merge);
    }
  }
  return found;
}

}  // namespace

BlockStages::BlockStages(const nn::Nodes& nodes)
    : readers_(nodes.num_values()) {
  const auto& list = nodes.list();
  FLATSHARD_CHECK(
      !list.empty() && list.back().outputs.size() == 1,
      usage,
      "a block in pieces: expected its last node to have one output, the "
      "output of the block");
  result_ = list.back().outputs.front();
  const std::vector<PlanNode> of = plan_nodes(nodes);
  for (std::size_t i = 0; i < list.size(); ++i) {
    Stage& stage = stages_[index(of[i])];
    stage.nodes.push_back(static_cast<int>(i));
    for (const int value : read_by(list[i])) {
      readers_[value].push_back(of[i]);
      const int maker = nodes.maker_of(value);
      const bool is_outside = maker < 0 || of[maker] != of[i];
      if (is_outside && value != list[i].addend) {
        add_once(stage.inputs, value);
      }
      if (maker >= 0 && of[maker] != of[i]) {
        add_once(stages_[index(of[maker])].outputs, value);
      }
    }
  }
  add_once(stages_[index(of.back())].outputs, result_);
  for (Stage& stage : stages_) {
    std::ranges::sort(stage.outputs);
  }
}

bool BlockStages::is_read(int value, PlanNode after, PlanNode up_to) const {
  return std::ranges::any_of(readers_[value], [&](PlanNode reader) {
    return reader > after && reader <= up_to;
  });
}

}  // namespace flatshard
