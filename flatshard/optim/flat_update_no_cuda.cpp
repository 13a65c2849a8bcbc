#include "flatshard/core/error.h"
#include "flatshard/optim/flat_update.h"

namespace flatshard {

void adamw_update_cuda(const FlatUpdate&) {
  FLATSHARD_THROW(
      config,
      "this build has no CUDA; configure with FLATSHARD_CUDA=on");
}

void sgd_update_cuda(const FlatUpdate&) {
  FLATSHARD_THROW(
      config,
      "this build has no CUDA; configure with FLATSHARD_CUDA=on");
}

}  // namespace flatshard
