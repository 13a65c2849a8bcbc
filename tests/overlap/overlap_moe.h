#pragma once

#include "flatshard/exchange/stream_exchange.h"
#include "flatshard/models/llama.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/overlap/overlap_runner.h"
#include "tests/runtime/training.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace flatshard::testing {

class MoeOverlapTrainer;

/// A small model, by default with a dense layer and two with experts, and how
/// it is trained.
struct MoeOverlapCase {
  std::string strategy = "zero3";
  int edp = 2;  ///< ranks that shard the same experts
  int ep = 1;   ///< ranks that divide them; above 1 tokens are exchanged
  bool copies = false;
  bool exchanges_alone = false;  ///< rows are exchanged also by one rank
  /// The exchange of layers whose rows stay here; null: LocalExchange.
  std::shared_ptr<nn::TokenExchange> local;
  int microbatches = 3;
  OverlapPlanOptions options;
  int layers = 3;
  std::int64_t dense_layers = 1;
  std::int64_t tokens = 16;  ///< of a microbatch
  int steps = 3;
  int max_delay_us = 200;
  bool with_runner = true;  ///< false: plain accumulation
  /// The regions that are graphs, after kWarmupSteps.
  std::set<std::string> regions;
  static constexpr int kWarmupSteps = 2;
  /// Attention is kept where a layer is recomputed (options.recompute).
  bool selective = false;
  /// Other differences, if any.
  std::function<void(FullyShardOptions& sharding)> change;
  std::function<void(models::ModelConfig& model)> change_model;
  /// Makes the tokens of a microbatch of random ones.
  std::function<at::Tensor(int microbatch, const at::Tensor& random)>
      change_tokens;
  std::function<void(MoeOverlapTrainer& trainer, int step)> before_step;

  bool has_outer() const { return strategy == "hsdp" || strategy == "hfsdp"; }
  int world() const { return (has_outer() ? 2 : 1) * edp * ep; }
  std::vector<MeshAxis> axes() const;
  std::string name() const;
};

/// One rank's part.
class MoeOverlapTrainer {
 public:
  /// Collective.
  MoeOverlapTrainer(
      const MoeOverlapCase& options,
      const std::shared_ptr<Mesh>& mesh);

  /// @return  the losses of this rank's microbatches.
  std::vector<double> forward_backward(int step);
  void update();

  models::Llama llama{nullptr};
  std::shared_ptr<StreamExchange> exchange;  ///< null: experts are here
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<OverlapRunner> runner;
  /// Called before the head of a microbatch; may throw.
  std::function<void(int microbatch)> before_head = [](int) {};

 private:
  void make_exchange(const StreamOptions& streams);
  at::Tensor tokens(int microbatch) const;

  MoeOverlapCase options_;
  std::shared_ptr<Mesh> mesh_;
  std::unique_ptr<Optimizer> optimizer_;
  int step_ = 0;
};

struct MoeOverlapResult {
  std::map<std::tuple<int, int, int>, double> losses;  ///< step, rank, microb.
  std::map<std::string, std::vector<float>> weights;
  /// For each rank, how often the layers' experts were chosen.
  std::map<int, std::vector<std::int64_t>> counts;
  std::map<int, GraphStats> graphs;  ///< by rank
};

/// One rank's part of train_overlapped_moe, on any mesh and device.
void train_overlapped_rank(
    const MoeOverlapCase& options,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    MoeOverlapResult& result);

/// On thread ranks.
MoeOverlapResult train_overlapped_moe(const MoeOverlapCase& options);

/// Every bit of what this process has: weights that it does not own are NaN.
void expect_same(const MoeOverlapResult& got, const MoeOverlapResult& want);

}  // namespace flatshard::testing
