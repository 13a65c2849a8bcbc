#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/device/stream.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <functional>
#include <memory>

namespace flatshard {

/// Tensor parallelism by collectives. Collectives whose result compute needs at
/// once are queued on the current stream, the others on a separate stream.
class CollectiveTensorParallel : public nn::TensorParallel {
 public:
  /// @param group  for nothing else; sums are in its order: of ranks on CPUs,
  ///   of NCCL's ring on GPUs.
  explicit CollectiveTensorParallel(
      std::shared_ptr<Communicator> group,
      StreamOptions options = {});

  at::Tensor all_gather(const at::Tensor& part) override;
  at::Tensor reduce_scatter(const at::Tensor& addend) override;
  std::unique_ptr<nn::PendingTensor> start_all_gather(
      const at::Tensor& part) override;
  std::unique_ptr<nn::PendingTensor> start_reduce_scatter(
      const at::Tensor& addend) override;

 private:
  class Pending;
  std::unique_ptr<nn::PendingTensor> start(
      const at::Tensor& out,
      const at::Tensor& in,
      std::function<void()> work);

  std::shared_ptr<Communicator> group_;
  std::shared_ptr<Stream> stream_;
};

}  // namespace flatshard
