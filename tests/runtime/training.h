#pragma once

#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/module.h"
#include "tests/support/ranks.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace flatshard::testing {

/// A residual block whose gradients come both ways: the linear layer writes
/// into the gradient slot, gain and shift arrive as plain tensors.
class ToyBlockImpl : public nn::Module {
 public:
  explicit ToyBlockImpl(std::int64_t dim);
  at::Tensor forward(const at::Tensor& x);

 private:
  nn::Linear up_{nullptr};
  at::Tensor gain_;
  at::Tensor shift_;
};
FLATSHARD_MODULE(ToyBlock);

/// Linear in, blocks, linear out, mean square loss. The root has a direct
/// parameter.
class ToyModelImpl : public nn::Module {
 public:
  ToyModelImpl(std::int64_t dim, int num_blocks, bool with_root_parameter);
  /// @param x  [B, dim] in the compute dtype.
  /// @return [] float32 loss.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target);
  std::vector<nn::Module*> unit_modules();
  std::vector<ToyBlock>& blocks() { return blocks_; }

 private:
  std::vector<ToyBlock> blocks_;
  nn::Linear out_{nullptr};
  at::Tensor temperature_;
};
FLATSHARD_MODULE(ToyModel);

struct TrainingCase {
  std::string strategy = "zero3";
  std::vector<std::int64_t> mesh = {1};  ///< axis sizes, outermost first
  int microbatches = 1;
  int steps = 3;
  int prefetch = 1;
  bool reshard_after_forward = true;
  int post_forward_ranks = 0;
  Precision precision = Precision::full();
  GradScaling scaling = GradScaling::mean;
  Granularity granularity;
  int max_delay_us = 0;
  bool no_sync = false;  ///< all microbatches but the last without collectives
  std::string optimizer = "adamw";
  double max_norm = 1.0;
  int batch_world = 0;  ///< ranks whose batches are drawn; 0: the mesh's
  bool with_root_parameter = true;
  bool grads_in_reduce_dtype = false;
  bool keep_compute_weights = true;
  bool offload = false;
  CopyEngines copy_engines;
  bool slots_on_demand = false;
  bool overlap_optimizer = false;
  bool evaluate = false;  ///< a forward before each step, which is not clipped

  int world() const;
};

/// The results of all ranks together.
struct TrainingResult {
  std::vector<double> losses;  ///< mean over ranks and microbatches
  std::vector<double> norms;
  std::map<std::string, std::vector<float>> weights;
};

/// One rank's part of `train_toy`, on any mesh and device. Adds this rank's
/// losses to `result.losses` (one entry per step).
void train_rank(
    const TrainingCase& options,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    TrainingResult& result);

/// Trains the toy model on `world` thread ranks. When batch_world = N on one
/// rank, that rank runs the batches of N ranks as microbatches in rank order.
TrainingResult train_toy(const TrainingCase& options);

/// Returns the same training without Flatshard: plain autograd, one process,
/// float32.
TrainingResult train_plain(const TrainingCase& options);

/// Writes what this rank owns of every parameter into `weights`.
void collect_weights(
    Runtime& runtime,
    std::mutex& mutex,
    std::map<std::string, std::vector<float>>& weights);

/// Returns the tolerance of losses, norms and weights of `c` over `world` ranks
/// against one rank, relative to the largest. All ranks multiply matrices of
/// the shapes that one rank has, so with the same kernels: only the sums over
/// ranks and microbatches have another order.
double training_tolerance(const TrainingCase& c, int world);

/// Returns the largest |a - b| over all weights, relative to the largest |a|.
double weight_distance(const TrainingResult& a, const TrainingResult& b);

}  // namespace flatshard::testing
