#pragma once

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/device/memory.h"
#include "flatshard/group/group_options.h"

namespace flatshard {

/// Returns a buffer of a group in host memory, for offloading. Not initialized.
inline FlatBuffer in_host_memory(
    const GroupContext& context,
    const Placements& placements,
    at::ScalarType dtype) {
  const std::int64_t numel =
      FlatBuffer::local_numel(*context.plan.layout, *context.mesh, placements);
  const at::Tensor memory = host_buffer(
      numel * static_cast<std::int64_t>(c10::elementSize(dtype)),
      context.options.pin_memory ? context.mesh->device()
                                 : at::Device(at::kCPU));
  return FlatBuffer::wrap(
      memory.view(dtype),
      context.plan.layout,
      context.mesh,
      placements);
}

}  // namespace flatshard
