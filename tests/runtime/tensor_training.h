#pragma once

#include "flatshard/models/llama.h"
#include "flatshard/runtime/graph_options.h"
#include "tests/runtime/training.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {

/// A run of ranks that share layers.
struct TensorRun {
  std::string model = "llama";  ///< one of tensor_models(), "multi_query",
                                ///< "dynamic_rope" or "wide"
  std::string strategy = "zero3";
  int replicate = 1;  ///< above 1: a separate axis
  int dp = 1;
  int cp = 1;     ///< ranks that share the tokens of a microbatch
  int hosts = 1;  ///< that these ranks are on
  int tp = 1;
  int ep = 1;   ///< ranks that divide the experts
  int etp = 1;  ///< ranks that divide their width: 1 or a multiple of tp
  int microbatches = 1;  ///< of a data rank
  models::ActivationCheckpoint checkpoint = models::ActivationCheckpoint::none;
  std::optional<std::int64_t> checkpointed_layers = {};  ///< unset: all
  bool keep_attention = false;        ///< of full checkpointing
  bool offload = false;               ///< what a recompute keeps
  std::int64_t mlp_chunk_tokens = 0;  ///< of a rank's own tokens
  std::int64_t chunk_tokens = 0;      ///< of the loss
  double max_norm = 1e6;              ///< clips nothing
  int batch = 1;                      ///< sequences of a microbatch
  bool documents = false;             ///< several share a sequence
  bool one_target = false;            ///< of the tokens of a microbatch
  std::uint64_t delay_seed = 3;
  int steps = 2;
  int post_forward_ranks = 0;
  double capacity_factor = 0;
  Precision precision = Precision::full();
  std::optional<Float8Format> float8 = {};   ///< of what it takes
  std::set<std::string> graph_regions = {};  ///< empty: no graphs of parts
  bool step_graph = false;  ///< forward and backward of a step as one graph
  bool copies = false;      ///< ranks that share layers or tokens copy
  /// Before the backward of a step's first microbatch; not with step_graph.
  std::function<void(const Mesh& mesh, int step)> before_backward = {};

  static constexpr int kWarmupSteps = 2;
  bool has_graphs() const { return step_graph || !graph_regions.empty(); }
  int data_ranks() const { return replicate * dp; }
  int world() const { return data_ranks() * cp * tp; }
  bool shares_experts() const { return ep * etp > 1; }
  /// Whether the ranks that share tokens divide the experts, as in the trainer.
  bool experts_span_tokens() const { return cp > 1 && ep % cp == 0; }
  /// Along which ranks have other experts.
  std::vector<std::string> division_axes() const;
  /// Along which ranks have other parts of the experts' width.
  std::vector<std::string> width_axes() const;
  std::vector<MeshAxis> axes() const;
  std::string name() const;
};

struct TensorResult {
  /// The key is (step, microbatch of all data ranks). All tp ranks have the
  /// same.
  std::map<std::pair<int, int>, double> losses;
  std::map<std::pair<int, int>, double> norms;  ///< by (step, rank)
  std::map<std::string, std::vector<float>> weights;
  std::map<int, GraphStats> graphs;  ///< by rank
  std::int64_t host_nbytes = 0;      ///< of kept activations, of all ranks
};

/// Returns the models by name: what sets families apart.
std::vector<std::string> tensor_models();

/// One rank's part of `train_tensor`, on any mesh with the run's axes.
void train_tensor_rank(
    const TensorRun& run,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    TensorResult& result);

/// Steps of SGD with a rate of 1 in float32 on thread ranks, so that the
/// weights show the gradients as they are.
TensorResult train_tensor(const TensorRun& run);

/// Returns the same sequences on one rank, with nothing sharded or recomputed.
TensorRun tensor_reference(const TensorRun& run);

/// The distance of two runs: the largest difference of a loss, of a norm
/// relative to it, or of a weight. A weight's difference is relative to the
/// parameter's largest one where that is above 1. Infinite where there is not
/// the same to compare, or ranks of a run differ in values that all of them
/// have.
struct TensorDistance {
  double largest = 0;
  std::string where;
};
TensorDistance tensor_distance(
    const TensorResult& got,
    const TensorResult& want);

/// Returns the largest distance of a run from its reference: sums over the
/// vocabulary, the width of a layer, or the tokens of a step in another order.
double tensor_tolerance(const TensorRun& run);

}  // namespace flatshard::testing
