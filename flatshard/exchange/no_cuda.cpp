#include "flatshard/core/error.h"
#include "flatshard/exchange/backend.h"

namespace flatshard::detail {

void cuda_copy_narrow_rows(
    const NarrowRows& /*rows*/,
    void* /*here*/,
    bool /*gathers*/) {
  FLATSHARD_THROW(internal, "a CUDA kernel was called in a build without CUDA");
}

}  // namespace flatshard::detail
