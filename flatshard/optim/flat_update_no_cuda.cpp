#include "flatshard/core/error.h"
#include "flatshard/optim/flat_update.h"

namespace flatshard {

void flat_update_cuda(Algorithm, const FlatUpdate&) {
  FLATSHARD_THROW(
      config,
      "this build has no CUDA; configure with FLATSHARD_CUDA=on");
}

}  // namespace flatshard
