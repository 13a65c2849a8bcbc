#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace flatshard {

/// Regions of units (nn/region.h) as CUDA graphs: their forward is one launch,
/// and so is their backward. All-gathers, reductions and hooks stay outside. Or
/// whole steps.
struct GraphOptions {
  bool enabled = false;
  /// Not regions but forward and backward of a step as one graph, with all
  /// collectives: for programs that run their steps by StepGraph.
  bool whole_step = false;
  /// Names of the regions: "block" for full blocks, or their parts such as
  /// "attn" and "mlp".
  std::set<std::string> regions = {"block"};
  /// Steps that run eagerly before anything is captured, and again after
  /// addresses changed. At least 1.
  int warmup_steps = 3;
  /// A region, or step, that cannot be replayed is an error; otherwise it runs
  /// eagerly, is counted, and each reason is logged once.
  bool miss_is_error = false;
  /// Debugging: checks of each captured graph whether its kernels touch memory
  /// outside the graphs, the unit's parameters and gradients, inputs and
  /// declared constants. Findings are logged and in GraphStats. Graphs keep
  /// their nodes in host memory then.
  bool audit = false;
  /// Without a GPU replays run the captured function again, into the tensors of
  /// a graph. Meant for tests; it raises an error otherwise.
  bool emulate_on_cpu = false;
};

/// The counts since the Runtime was made.
struct GraphStats {
  std::int64_t captures = 0;  ///< forwards and backwards
  std::int64_t forward_replays = 0;
  std::int64_t backward_replays = 0;
  std::int64_t step_replays = 0;  ///< of StepGraph
  /// Forwards and backwards of regions, or steps, that ran eagerly after the
  /// warm-up, by reason.
  std::map<std::string, std::int64_t> fallbacks;
  std::int64_t nbytes = 0;  ///< allocated on the device for the graphs
  /// The number of addresses in the kernels of captured graphs, with
  /// GraphOptions::audit.
  std::int64_t audited_addresses = 0;
  /// The addresses in memory that others have, each with its region and kernel.
  std::vector<std::string> audit_findings;
};

/// "CUDA graphs: 128 captured (1.2 GB), 640 forward and 640 backward replays; 2
/// ran eagerly: an input has another shape (2)".
std::string to_string(const GraphStats& stats);

}  // namespace flatshard
