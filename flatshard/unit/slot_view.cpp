#include "flatshard/unit/slot_view.h"

#include <ATen/ATen.h>

namespace flatshard {

at::Tensor SlotView::tensor(
    std::int64_t offset,
    at::IntArrayRef sizes,
    at::ScalarType dtype) const {
  // With the device set, the driver is not queried for the address.
  return at::for_blob(at(offset), sizes)
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace flatshard
