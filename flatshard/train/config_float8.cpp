#include "flatshard/train/config_float8.h"

#include "flatshard/core/error.h"

namespace flatshard {

void check_float8(const Config& config) {
  const Config::Float8& float8 = config.float8;
  if (float8.recipe == "none") {
    return;
  }
  FLATSHARD_CHECK(
      config.precision.compute == "bfloat16",
      config,
      "float8.recipe = \"{}\" computes beside bfloat16, got precision.compute "
      "= \"{}\"",
      float8.recipe,
      config.precision.compute);
  FLATSHARD_CHECK(
      config.cuda_graph.impl != "unit" ||
          config.activation_checkpoint.mode != "full",
      config,
      "float8.recipe = \"{}\" with cuda_graph.impl = \"unit\" and "
      "activation_checkpoint.mode = \"full\": no graph recomputes FP8 weights; "
      "use \"full_iteration\", or another mode",
      float8.recipe);
  FLATSHARD_CHECK(
      float8.column_plane != "stored" || float8.recipe == "rowwise" ||
          float8.recipe == "mxfp8",
      config,
      "float8.column_plane = \"stored\" is for rowwise and mxfp8: rows and "
      "columns of {} hold the same numbers; use auto",
      float8.recipe);
}

}  // namespace flatshard
