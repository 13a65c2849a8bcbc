#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/exchange/stream_exchange.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// The loads of a model's experts over all ranks: their metrics, and the biases
/// that balance them. Does nothing for a model without experts.
class ExpertLoads {
 public:
  /// @param balance_rate  by which a step moves the biases; 0: there are none.
  ExpertLoads(
      double balance_rate,
      models::Llama model,
      std::shared_ptr<StreamExchange> exchange,
      std::shared_ptr<Mesh> mesh);

  /// Returns the biases, to be saved in checkpoints.
  std::vector<WholeTensor> buffers() const;

  void begin_step(bool logged);
  /// Called after the backward of a step that counts: moves the biases by its
  /// loads. Collective where there are biases, and in logged steps. Queues
  /// only.
  void end_step(bool logged);
  /// Called after the backward of a step that does not count.
  void discard_step();

  /// Returns the metrics of the last logged step; unset without experts.
  /// Blocks.
  std::optional<ExpertMetrics> metrics();

 private:
  const double balance_rate_;
  const std::shared_ptr<Mesh> mesh_;
  models::Llama model_;
  std::shared_ptr<StreamExchange> exchange_;  ///< null: experts are here
  const std::vector<models::RouterOf> routers_;
  /// float64 [routers, experts + 3] of the last logged step: counts, how many
  /// were kept, the sum of balances and of how many forwards.
  at::Tensor loads_;
};

}  // namespace flatshard
