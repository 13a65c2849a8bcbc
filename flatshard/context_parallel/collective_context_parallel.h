#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/context_parallel/measured_waits.h"
#include "flatshard/device/stream.h"
#include "flatshard/nn/parallel/context_parallel.h"

#include <memory>
#include <vector>

namespace flatshard {

/// Context parallelism by collectives: an all-to-all for each tensor, or an
/// all-gather where all ranks get the same block, on a separate stream. Compute
/// packs what is sent and unpacks what arrives, where blocks are not
/// contiguous.
class CollectiveContextParallel : public nn::ContextParallel {
 public:
  /// @param group  for nothing else.
  /// @param hosts  see ContextParallel.
  explicit CollectiveContextParallel(
      std::shared_ptr<Communicator> group,
      StreamOptions options = {},
      nn::ContextParallelPtr hosts = nullptr);

  std::unique_ptr<nn::PendingExchange> start(
      std::vector<nn::RankBlocks> blocks) override;
  void measure(bool measures) override {
    ContextParallel::measure(measures);
    waits_.measure(measures);
  }
  double wait_and_take_exposed_ms() override {
    return waits_.wait_and_take_ms() +
           ContextParallel::wait_and_take_exposed_ms();
  }

 private:
  class Pending;

  std::shared_ptr<Communicator> group_;
  std::shared_ptr<Stream> stream_;
  MeasuredWaits waits_;
};

}  // namespace flatshard
