#pragma once

#include "flatshard/mesh/mesh.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace flatshard::testing {

/// Returns a training program as data: how it is sharded, a model (see
/// NodeImpl), and the steps with what they do in each microbatch:
///
///     {"seed": 7, "mesh": [2], "strategy": "zero3", "prefetch": 1,
///      "reshard": true, "granularity": "element", "delay_us": 50,
///      "model": {...},
///      "steps": [{"no_sync": false, "micro": ["fb", "eval", "ffbb"]}]}
///
/// "post_forward_ranks" may be there as well; see ParamGroupOptions. With
/// "offload" kept activations are in host memory; see RuntimeOptions. For
/// several models, "others" has them and "link" selects how a step runs through
/// them (see ProgramModel).
///
/// The same seed gives the same program on every machine.
nlohmann::json
random_program(std::uint64_t seed, int world, int num_models = 1);

/// Smaller programs, each with one simplification; the largest ones first.
std::vector<nlohmann::json> smaller_programs(const nlohmann::json& program);

int world_of(const nlohmann::json& program);
std::vector<MeshAxis> axes_of(const nlohmann::json& program);

struct ProgramResult {
  /// False when plain autograd rejects the program too: it proves nothing.
  bool valid = true;
  /// Differences from the unsharded twin on this rank, and broken invariants.
  std::vector<std::string> problems;
  /// Compared between the ranks.
  std::vector<CollectiveRecord> collectives;
};

/// Runs a program on this rank, sharded over `mesh` and plain, and compares the
/// gradients before and the weights after every step. `log` is the log of the
/// mesh. An unintended exception of the sharded model is a problem too.
ProgramResult run_program(
    const nlohmann::json& program,
    const std::shared_ptr<Mesh>& mesh,
    const std::shared_ptr<CollectiveLog>& log);

/// Returns the problems of all ranks' results together; empty when all is well.
std::vector<std::string> problems_of(const std::vector<ProgramResult>& ranks);

}  // namespace flatshard::testing
