#include "flatshard/moe/nodes.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/second_run.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace flatshard::nn {
namespace {

bool reads(const Node& node, int value) {
  return node.addend == value ||
         std::ranges::find(node.inputs, value) != node.inputs.end();
}

}  // namespace

std::vector<int> Nodes::append(Node node, int num_outputs) {
  std::vector<int> read = node.inputs;
  if (node.addend >= 0) {
    read.push_back(node.addend);
  }
  for (const int value : read) {
    FLATSHARD_CHECK(
        value >= 0 && value < num_values_,
        usage,
        "node {} of a block: expected inputs below {} (the outputs of earlier "
        "nodes), got {}",
        node.name,
        num_values_,
        value);
  }
  node.outputs.resize(num_outputs);
  std::iota(node.outputs.begin(), node.outputs.end(), num_values_);
  num_values_ += num_outputs;
  list_.push_back(std::move(node));
  return list_.back().outputs;
}

std::vector<int> Nodes::add(
    std::string name,
    std::vector<int> inputs,
    int num_outputs,
    std::vector<const Module*> reads,
    Node::Body body) {
  return append(
      {.name = std::move(name),
       .inputs = std::move(inputs),
       .reads = std::move(reads),
       .body = std::move(body)},
      num_outputs);
}

std::vector<int> Nodes::exchange(
    std::string name,
    std::vector<int> inputs,
    std::function<RowRoute()> route,
    int addend,
    bool is_result_of_part) {
  const auto num_outputs = static_cast<int>(inputs.size());
  return append(
      {.name = std::move(name),
       .inputs = std::move(inputs),
       .route = std::move(route),
       .addend = addend,
       .is_result_of_part = is_result_of_part},
      num_outputs);
}

int Nodes::maker_of(int value) const {
  for (std::size_t i = 0; i < list_.size(); ++i) {
    const std::vector<int>& outputs = list_[i].outputs;
    if (std::ranges::find(outputs, value) != outputs.end()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

TensorList Nodes::run(TensorList inputs) const {
  FLATSHARD_CHECK(
      !list_.empty(),
      usage,
      "a block of nodes: expected one node or more, got 0");
  std::vector<int> all(list_.size());
  std::iota(all.begin(), all.end(), 0);
  const std::vector<int>& results = list_.back().outputs;
  TensorList values = std::move(inputs);
  values.resize(num_values_);
  run(all, results, values);
  return {
      values.begin() + results.front(),
      values.begin() + results.back() + 1};
}

void Nodes::run(
    const std::vector<int>& which,
    const std::vector<int>& wanted,
    TensorList& values) const {
  const auto is_wanted = [&](int value, std::size_t since) {
    return std::ranges::find(wanted, value) != wanted.end() ||
           std::any_of(which.begin() + since, which.end(), [&](int i) {
             return reads(list_[i], value);
           });
  };
  for (std::size_t position = 0; position < which.size(); ++position) {
    const Node& node = list_[which[position]];
    TensorList outputs;
    {
      TensorList inputs;
      for (const int value : node.inputs) {
        inputs.push_back(values[value]);
      }
      outputs = node.is_exchange()
                    ? exchange_rows(
                          node.route(),
                          inputs,
                          node.addend < 0 ? at::Tensor() : values[node.addend],
                          node.is_result_of_part && in_second_run())
                    : node.body(inputs);
    }
    FLATSHARD_CHECK(
        outputs.size() == node.outputs.size(),
        usage,
        "node {} of a block: expected the {} outputs that it was added with, "
        "got {}",
        node.name,
        node.outputs.size(),
        outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      values[node.outputs[i]] = std::move(outputs[i]);
    }
    for (std::size_t v = 0; v < values.size(); ++v) {
      if (!is_wanted(static_cast<int>(v), position + 1)) {
        values[v] = at::Tensor();
      }
    }
  }
}

}  // namespace flatshard::nn
