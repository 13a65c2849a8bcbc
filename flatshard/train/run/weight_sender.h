#pragma once

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/checkpoint/weight_stream.h"
#include "flatshard/core/stored_entry.h"
#include "flatshard/group/param_group.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/train/run/run_output.h"
#include "flatshard/train/run/sglang_engine.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// Sends the weights of a run to an inference engine every `every` steps and
/// after the last one, in compute dtypes and under Hugging Face names: the
/// values of an export with this --dtype.
///
/// All ranks all-gather, and rank 0 sends. An engine that is away, refuses or
/// dies costs a warning, and training is bitwise what it is without it.
class WeightSender {
 public:
  struct Options {
    SglangEngine::Options engine;
    std::int64_t every = 1;  ///< steps
    std::int64_t last_step = 0;
    std::chrono::milliseconds timeout{};  ///< of one send
  };
  struct Parts {
    std::shared_ptr<Mesh> mesh;  ///< of the run
    std::vector<const ParamGroup*> groups;
    StoredEntriesOf entries_of;
    std::vector<WholeTensor> buffers;  ///< equal on all ranks
    RunOutput* output = nullptr;       ///< only on rank 0
  };

  WeightSender(const Options& options, Parts parts);

  /// Returns whether weights are sent after this step.
  bool due(std::int64_t step) const;

  /// Sends the weights, between two steps. Collective; blocks the host.
  /// Memory on each rank, in compute dtypes: two groups, and with tensor or
  /// expert parallelism the full parameters of one. On rank 0 also a bucket of
  /// at most 512 MiB, or of the largest tensor.
  void send(std::int64_t step);

 private:
  /// Runs `work` with the engine. After a failure later calls have no effect.
  void with_engine(const std::function<void(SglangEngine&)>& work);
  /// All-gathers everything; rank 0 sends it until a failure.
  /// @return the bytes that were sent.
  std::int64_t send_all();

  const Options options_;
  const Parts parts_;
  std::unique_ptr<SglangEngine> engine_;  ///< only on rank 0
  std::string error_;                     ///< of this `send`
  std::int64_t failures_ = 0;
};

}  // namespace flatshard
