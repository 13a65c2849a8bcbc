#pragma once

#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/models/llama.h"
#include "flatshard/schedule/simulate.h"
#include "tests/runtime/training.h"

#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {

/// A training of a small Llama with FP8 weights.
struct Float8Case {
  static constexpr std::int64_t kDim = 128;
  static constexpr std::int64_t kFfn = 256;
  static constexpr int kLayers = 2;
  static constexpr int kWarmupSteps = 2;

  std::optional<Float8Format> format;
  std::string strategy = "zero3";
  std::vector<std::int64_t> mesh = {1};
  int microbatches = 1;
  int steps = 3;
  GatherParts gather_parts = GatherParts::recomputed;
  models::ActivationCheckpoint checkpoint = models::ActivationCheckpoint::none;
  bool reshard_after_forward = true;
  bool offload = false;
  bool keep_compute_weights = true;
  CopyEngines copy_engines;
  /// Each step is a graph, after two warm-up steps: one, and one with the parts
  /// that its recomputation taught.
  bool whole_step = false;
  /// Regions that are graphs, after the same warm-up.
  std::set<std::string> regions;
  bool poison = false;
  bool freezes_attention = false;
  bool prefetches_between_steps = true;
  int max_delay_us = 0;
  int reporting_rank = 0;  ///< whose actions, units and graphs a run has

  int world() const;
};

struct Float8Run {
  /// The key is a step and microbatch of all ranks, in rank order.
  std::map<std::pair<int, int>, double> losses;
  std::map<std::string, std::vector<float>> weights;
  std::vector<Action> last_step;
  std::vector<UnitSpec> units;
  GraphStats graphs;
};

/// The same losses and weights, bit for bit.
void expect_same_run(const Float8Run& a, const Float8Run& b);

/// Returns every recipe, with both kinds of columns where it has them.
std::vector<Float8Format> float8_formats();
/// Returns the name for parameterized tests.
std::string name_of_format(const Float8Format& format);

models::Llama make_llama(models::ActivationCheckpoint checkpoint);
std::shared_ptr<Runtime> shard_llama(
    models::Llama& llama,
    const std::shared_ptr<Mesh>& mesh,
    const Float8Case& c);

/// One rank's part, on any mesh and device.
void train_float8_rank(
    const Float8Case& c,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    Float8Run& result);
/// On ranks that are threads.
Float8Run train_float8(const Float8Case& c);

}  // namespace flatshard::testing
