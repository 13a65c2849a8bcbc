#include "flatshard/mesh/on_all_ranks.h"

#include <ATen/Functions.h>

#include <exception>

#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"

namespace flatshard {

std::int64_t on_all_ranks(
    Mesh& mesh,
    std::string_view name,
    const std::function<std::int64_t()>& work) {
  if (mesh.size() == 1) {
    return work();
  }
  std::exception_ptr error;
  // For each rank 1 if it failed, then rank 0's result.
  at::Tensor sums = at::zeros({mesh.size() + 1}, at::kLong);
  try {
    const std::int64_t result = work();
    sums[mesh.size()] = mesh.rank() == 0 ? result : 0;
  } catch (...) {
    error = std::current_exception();
    sums[mesh.rank()] = 1;
  }
  sums = sums.to(mesh.device());
  {
    const CollectiveScope scope(name);
    mesh.world().all_reduce(sums, ReduceOp::sum);
  }
  sums = sums.cpu();
  mesh.check();
  if (error) {
    std::rethrow_exception(error);
  }
  for (int rank = 0; rank < mesh.size(); ++rank) {
    FLATSHARD_CHECK(
        sums[rank].item<std::int64_t>() == 0,
        io,
        "{}: rank {} failed, and therefore all ranks; see the error of rank {}",
        name,
        rank,
        rank);
  }
  return sums[mesh.size()].item<std::int64_t>();
}

}  // namespace flatshard
