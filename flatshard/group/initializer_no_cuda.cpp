#include "flatshard/core/error.h"
#include "flatshard/group/initializer_backend.h"

namespace flatshard::detail {

void draw_cuda(
    const at::Tensor& /*out*/,
    std::uint64_t /*key*/,
    const InitSpec& /*spec*/,
    const FlatRuns& /*runs*/) {
  FLATSHARD_THROW(
      config,
      "this build has no CUDA; configure with FLATSHARD_CUDA=on");
}

}  // namespace flatshard::detail
