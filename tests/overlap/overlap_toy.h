#pragma once

#include "flatshard/nn/linear.h"
#include "flatshard/nn/module.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/overlap/overlap_runner.h"
#include "tests/runtime/training.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace flatshard::testing {

/// Stands for a block with experts: rows are the tokens in another order, and
/// travelling turns them round by one.
class OverlapBlockImpl : public nn::Module {
 public:
  OverlapBlockImpl(bool dense, bool with_shared);
  /// Runs the nodes one after the other, in one graph.
  at::Tensor forward(const at::Tensor& tokens);
  nn::Nodes nodes();

  /// Called when a piece runs, with its name; may throw, or change what comes.
  std::function<void(const std::string& node)> on_node;

 private:
  void say(const char* node) const;

  bool dense_;
  std::shared_ptr<nn::TokenExchange> exchange_;
  bool with_shared_;
  nn::Linear attend_{nullptr}, expert_{nullptr}, shared_{nullptr};
  at::Tensor gain_;
};
FLATSHARD_MODULE(OverlapBlock);

class OverlapStackImpl : public nn::Module {
 public:
  OverlapStackImpl(int layers, const OverlapPlanOptions& options);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target);
  at::Tensor embed(const at::Tensor& x);
  at::Tensor head(const at::Tensor& tokens, const at::Tensor& target);

  std::vector<OverlapBlock> blocks;
  nn::Linear in{nullptr}, out{nullptr};

 private:
  at::Tensor temperature_;
};
FLATSHARD_MODULE(OverlapStack);

struct OverlapCase {
  std::string strategy = "zero3";
  int microbatches = 3;
  OverlapPlanOptions options;
  int layers = 4;
  int steps = 3;
  int max_delay_us = 100;
  bool with_runner = true;     ///< false: plain accumulation
  bool ends_are_units = true;  ///< false: they are the root's

  bool has_outer() const { return strategy == "hsdp" || strategy == "hfsdp"; }
  int world() const { return has_outer() ? 4 : 2; }
  std::string name() const;
};

/// One rank's sharded model and how a step of it runs.
class OverlapTrainer {
 public:
  OverlapTrainer(const OverlapCase& options, const RankContext& context);
  /// Returns the losses of this rank by microbatch.
  std::vector<double> forward_backward(int step);
  void update();

  OverlapStack model;
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<OverlapRunner> runner;

 private:
  std::pair<at::Tensor, at::Tensor> batch(int microbatch) const;

  OverlapCase options_;
  int rank_;
  int step_ = 0;
  std::unique_ptr<Optimizer> optimizer_;
};

struct OverlapResult {
  std::map<std::tuple<int, int, int>, double> losses;  ///< step, rank, microb.
  std::map<std::string, std::vector<float>> weights;

  bool operator==(const OverlapResult&) const = default;
};

OverlapResult train_overlapped(const OverlapCase& options);

}  // namespace flatshard::testing
