#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/context_parallel/measured_waits.h"
#include "flatshard/device/stream.h"
#include "flatshard/nn/parallel/context_parallel.h"

#include <memory>
#include <vector>

namespace flatshard {

/// Context parallelism by collectives: an all-to-all for each tensor, on a
/// separate stream. Compute packs what is sent and unpacks what arrives, where
/// blocks are not contiguous.
class CollectiveContextParallel : public nn::ContextParallel {
 public:
  /// @param group  for nothing else.
  explicit CollectiveContextParallel(
      std::shared_ptr<Communicator> group,
      StreamOptions options = {});

  std::unique_ptr<nn::PendingExchange> start(
      std::vector<nn::RankBlocks> blocks) override;
  void measure(bool measures) override { waits_.measure(measures); }
  double wait_and_take_exposed_ms() override {
    return waits_.wait_and_take_ms();
  }

 private:
  class Pending;

  std::shared_ptr<Communicator> group_;
  std::shared_ptr<Stream> stream_;
  MeasuredWaits waits_;
};

}  // namespace flatshard
