#pragma once

#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/graphs/step_graph.h"
#include "flatshard/optim/adamw.h"
#include "tests/support/ranks.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace flatshard::testing {

/// One cell of the matrix: a small model, trained with or without graphs.
struct GraphCase {
  static constexpr int kLayers = 3;

  std::set<std::string> regions = {"block"};
  std::string strategy = "zero3";
  std::vector<std::int64_t> mesh = {1};  ///< axis sizes, outermost first
  bool recompute = false;
  bool keep_attention = false;  ///< of what is recomputed
  int microbatches = 1;
  bool float32_reduce = true;
  bool bf16_compute = false;
  bool dropout = false;
  int steps = 8;
  int warmup_steps = 2;
  int prefetch = 1;
  int post_forward_ranks = 0;
  bool graphs = true;
  /// Runs by StepGraph instead of by regions.
  bool whole_step = false;
  bool miss_is_error = false;
  bool audit = false;
  int max_delay_us = 0;

  std::string name() const;
  int world() const;
};

/// The results of one rank.
struct GraphRun {
  std::vector<double> losses;         ///< by microbatch
  std::vector<at::Tensor> gradients;  ///< by step and group, on the host
  std::string actions;                ///< of all steps
  GraphStats stats;
};

/// The model, its runtime, and what happens between two of its steps.
class GraphTraining;
struct GraphHooks {
  /// Before step `step`.
  std::function<void(GraphTraining& training, int step)> before_step;
  /// Called for microbatch `m` of the step, between forward and backward. It is
  /// not part of a StepGraph's replay.
  std::function<void(GraphTraining& training, int step, at::Tensor& loss)>
      before_backward;
  /// Called after the backwards of step `step`, before clipping and optimizer.
  std::function<void(GraphTraining& training, int step)> before_update;
};

class GraphTraining {
 public:
  GraphTraining(const GraphCase& c, std::shared_ptr<Mesh> mesh);
  ~GraphTraining();
  GraphRun run(const GraphHooks& hooks = {});
  /// One forward; the loss.
  at::Tensor forward(int step, int microbatch, std::int64_t batch = 2);
  /// Sets the rows of each microbatch's batch in the steps to come.
  void set_batch(std::int64_t batch) { batch_ = batch; }
  /// GraphCase::whole_step; null without.
  StepGraph* step_graph() { return step_graph_.get(); }
  AdamW& optimizer() { return *optimizer_; }
  Runtime& runtime() { return *runtime_; }
  const std::shared_ptr<Runtime>& shared_runtime() { return runtime_; }
  nn::Module& model();
  /// Returns the modules of the units, in order.
  std::vector<nn::Module*> units() const { return units_; }

 private:
  struct Model;

  nn::TensorList batch(int step, int microbatch, std::int64_t rows) const;
  at::Tensor loss_of(const at::Tensor& in, const at::Tensor& targets);
  /// Returns the losses of all microbatches, after their backwards.
  nn::TensorList forward_backward(
      const nn::TensorList& inputs,
      const std::function<void(at::Tensor&)>& before_backward);

  GraphCase case_;
  std::shared_ptr<Mesh> mesh_;
  std::unique_ptr<Model> model_;
  std::vector<nn::Module*> units_;
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<StepGraph> step_graph_;
  std::unique_ptr<AdamW> optimizer_;
  std::int64_t batch_ = 2;
};

/// Rank 0's run of a case, on thread ranks and CPUs.
GraphRun train_graphs(const GraphCase& c, const GraphHooks& hooks = {});

/// Each pair of values of two options stands in one of them, at 1, 2 and 4
/// ranks.
std::vector<GraphCase> pairwise_graph_cases();
/// Returns all values of all options, on one axis of `world` ranks.
std::vector<GraphCase> all_graph_cases(int world);
/// Returns the same for whole steps. Cases whose recomputation draws random
/// numbers are left out, since steps reject them.
std::vector<GraphCase> pairwise_step_cases();
std::vector<GraphCase> all_step_cases(int world);
/// Returns where in all_step_cases the former are.
std::vector<int> pairwise_step_indices();

}  // namespace flatshard::testing
