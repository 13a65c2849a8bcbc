#include "flatshard/float8/requantize.h"

#include "flatshard/float8/cuda_float8_ops.h"

#include <ATen/ATen.h>

namespace flatshard::float8 {

void requantize_into(
    const Plane& columns,
    const Plane& rows,
    const Quantizer& quantizer) {
  const PlaneOptions along_columns{.axis = Axis::column};
  if (cuda::requantizes(rows, quantizer)) {
    cuda::requantize(
        rows,
        quantizer,
        plane_over(
            columns,
            rows.data.size(0),
            rows.data.size(1),
            quantizer,
            along_columns));
    return;
  }
  quantize_into(
      columns,
      dequantize(rows, quantizer.recipe, {.dtype = at::kBFloat16}),
      quantizer,
      along_columns);
}

}  // namespace flatshard::float8
