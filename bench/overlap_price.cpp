// Computes how long a step of two microbatches at once takes by the times of
// its nodes, and how long with one microbatch after the other.
// bench/overlap_trace.py prints the times. That of an exchange is one way.
// usage: flatshard_overlap_price LAYERS MICROBATCHES PASS.NODE=MS...
//   e.g. flatshard_overlap_price 48 8 F.attend=1.1 F.dispatch=0.67 B.attend=2.2
#include "flatshard/schedule/overlap_price.h"
#include "flatshard/core/error.h"

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

std::optional<std::pair<PlanPass, PlanNode>> parse_node(
    const std::string& name) {
  const std::pair<char, PlanPass> passes[] = {
      {'F', PlanPass::forward},
      {'R', PlanPass::recompute},
      {'B', PlanPass::backward},
      {'W', PlanPass::wgrad}};
  for (const auto& [letter, pass] : passes) {
    for (int node = 0; node <= static_cast<int>(PlanNode::head); ++node) {
      const auto of = static_cast<PlanNode>(node);
      if (name == fmt::format("{}.{}", letter, to_string(of))) {
        return std::pair(pass, of);
      }
    }
  }
  return std::nullopt;
}

void price(int layers, int microbatches, const NodeTimes& times) {
  const auto has = [&](PlanPass pass, PlanNode node) {
    return times.contains({pass, node});
  };
  OverlapPlanOptions options{
      .recompute = has(PlanPass::recompute, PlanNode::attend),
      .shared_experts = has(PlanPass::forward, PlanNode::shared)};
  fmt::print("{:24} {:>10} {:>10} {:>10}\n", "ms", "step", "compute", "waits");
  double alone = 0;
  for (const auto& [in_flight, late] :
       {std::pair(1, false), std::pair(2, false), std::pair(2, true)}) {
    options.in_flight = in_flight;
    options.delay_wgrad = late;
    const auto plan = overlap_plan(layers, microbatches, options);
    const PlanPrice step = price_plan(plan, layers, options, times);
    alone = alone == 0 ? step.total : alone;
    fmt::print(
        "{:24} {:10.2f} {:10.2f} {:10.2f}  {:.3f}x\n",
        in_flight == 1 ? "one after the other"
        : late         ? "two, late weight grads"
                       : "two at once",
        step.total,
        step.compute,
        step.exposed(),
        alone / step.total);
  }
}

int main_of(const std::vector<std::string>& args) {
  FLATSHARD_CHECK(
      args.size() > 3,
      usage,
      "expected LAYERS MICROBATCHES PASS.NODE=MS..., got {} arguments",
      args.size() - 1);
  NodeTimes times;
  for (std::size_t i = 3; i < args.size(); ++i) {
    const std::size_t at = args[i].find('=');
    const auto node = parse_node(args[i].substr(0, at));
    FLATSHARD_CHECK(
        node && at != std::string::npos,
        usage,
        "expected a node's time such as F.attend=1.1, got '{}'",
        args[i]);
    times[*node] = std::stod(args[i].substr(at + 1));
  }
  price(std::stoi(args[1]), std::stoi(args[2]), times);
  return 0;
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  try {
    return flatshard::main_of({argv, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
