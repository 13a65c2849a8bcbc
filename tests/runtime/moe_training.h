#pragma once

#include "flatshard/models/llama.h"
#include "tests/runtime/training.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {

enum class MoeExchange { none, collective, copies };

struct MoeRun {
  std::string name;
  std::string strategy = "zero3";
  std::vector<int> mesh{2};
  int microbatches = 1;  ///< of a rank
  models::ActivationCheckpoint checkpoint = models::ActivationCheckpoint::none;
  bool reshard_after_forward = true;
  double capacity_factor = 0;
  double max_norm = 1e6;  ///< clips nothing
  /// Not none: the last axis of the mesh is for experts, or the last but one,
  /// see cuts_width.
  MoeExchange exchange = MoeExchange::none;
  /// The ranks along the last axis of the mesh divide the width of experts.
  bool cuts_width = false;
  /// One matmul over the tokens of two ranks is rounded to bfloat16 once, the
  /// matmuls of two microbatches twice: only float32 can be bitwise identical.
  bool float32 = exchange != MoeExchange::none;
  bool aux_loss = true;  ///< and z loss
  bool bias = true;      ///< of the routers, moved by the load after each step
  /// See ExchangeOptions::groups_by_rank: otherwise, an expert's rows are one
  /// matmul.
  bool groups_by_rank = true;
  std::uint64_t delay_seed = 3;
  /// After one step, of `regions`.
  bool graphs = false;
  std::set<std::string> regions{"attn", "mlp", "moe_router"};
  int steps = 3;

  int world() const;
  int sequences() const { return world() * microbatches; }
};

struct MoeResult {
  std::map<std::pair<int, int>, double> losses;  ///< by (step, sequence)
  std::map<int, double> norms;                   ///< by step
  std::map<std::string, std::vector<float>> weights;
  std::vector<at::Tensor> biases;
  std::int64_t num_replays = 0;  ///< forwards and backwards of one rank
};

/// One rank's part of `train_moe`, on any mesh and device. Adds its sequences'
/// losses and its shards of the weights to `result`; norms and biases are from
/// rank 0.
void train_moe_rank(
    const MoeRun& run,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    MoeResult& result);

/// Three steps of a small model with experts on thread ranks, with seeded
/// delays on every stream.
MoeResult train_moe(const MoeRun& run);

/// Returns the same sequences on one rank, each a microbatch, with nothing
/// sharded, recomputed or sent.
MoeRun moe_reference(const MoeRun& run);

/// How far a run is from another.
struct MoeDistance {
  double largest = 0;  ///< difference of two losses, norms or weights
  std::string where;
};

/// Infinite where the routers' biases differ, or what there is to compare.
MoeDistance moe_distance(const MoeResult& got, const MoeResult& want);

/// Returns the tolerance of a run's difference from its reference. Each rank
/// multiplies the same matrices as the reference, sequence by sequence, so with
/// the same kernels: only sums over sequences, and over parts of an expert's
/// width, have another order. Clipping and
/// AdamW hand that on to the weights in each step. Two ranks with a microbatch
/// each have one order, whichever of them adds: 0.
double moe_tolerance(const MoeRun& run);

}  // namespace flatshard::testing
