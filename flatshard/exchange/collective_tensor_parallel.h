#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <memory>

namespace flatshard {

/// Tensor parallelism by collectives, which are queued on the stream that is
/// current: compute needs their results at once.
class CollectiveTensorParallel : public nn::TensorParallel {
 public:
  /// @param group  for nothing else; sums are in its order: of ranks on CPUs,
  ///   of NCCL's ring on GPUs.
  explicit CollectiveTensorParallel(std::shared_ptr<Communicator> group);

  at::Tensor all_gather(const at::Tensor& part) override;
  at::Tensor reduce_scatter(const at::Tensor& addend) override;

 private:
  std::shared_ptr<Communicator> group_;
};

}  // namespace flatshard
