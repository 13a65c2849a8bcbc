#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "flatshard/mesh/mesh.h"
#include "flatshard/models/llama.h"
#include "flatshard/train/data/document_buffers.h"
#include "flatshard/train/data/token_buffers.h"
#include "flatshard/train/data/validation_set.h"
#include "flatshard/train/metrics/metrics.h"

namespace flatshard {

/// The loss on the validation sets of a run, measured every `freq` steps and
/// after the last one.
class Evaluation {
 public:
  struct Options {
    std::int64_t freq = 1;  ///< in steps
    std::int64_t last_step = 0;
    std::int64_t local_batch_size = 1;
    data::PackingOptions packing;
    bool drops_tokens = false;  ///< experts have a capacity
  };

  /// @param sets  at least one.
  /// @param mesh  of the model. Ranks that share sequences (AxisRole) read the
  ///   same ones, and each keeps its part of their tokens.
  Evaluation(
      const Options& options,
      std::vector<ValidationSet> sets,
      const std::shared_ptr<Mesh>& mesh,
      models::Llama model);

  /// Returns whether one belongs after this step.
  bool due(std::int64_t step) const;

  /// Runs the forward of every sequence of the sets, shared out to the ranks in
  /// batches of local_batch_size. Collective; blocks the host.
  /// @return the same on all ranks.
  /// @throws Error{format, io} naming the option of the data; the verdict on a
  /// rank that failed.
  ValidationMetrics run(std::int64_t step);

 private:
  /// The sums of this rank's part of a set.
  struct Sums {
    double nats = 0;  ///< the losses of its targets
    ValidationSet::Counts counts;
  };
  Sums sum_of(const ValidationSet& set);
  /// @param count  the rows of a batch that the loss reads.
  nn::Documents documents_of(std::int64_t count) const;

  const std::int64_t freq_;
  const std::int64_t last_step_;
  const std::int64_t local_batch_;
  const std::int64_t seq_len_;
  const bool drops_tokens_;
  const std::vector<ValidationSet> sets_;
  std::shared_ptr<Mesh> mesh_;  ///< ranks that read different samples
  std::shared_ptr<Mesh> token_mesh_;
  const TokenPart part_;
  models::Llama model_;
  TokenBuffers buffers_;                      ///< of one batch
  std::optional<DocumentBuffers> documents_;  ///< for packed documents
};

}  // namespace flatshard
