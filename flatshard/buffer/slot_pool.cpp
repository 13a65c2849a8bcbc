#include "flatshard/buffer/slot_pool.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {

void SlotPool::set_arena(std::int64_t nbytes) {
  FLATSHARD_CHECK(
      num_held_ == 0,
      internal,
      "the arena can change only while no slot is in use, but {} are",
      num_held_);
  if (nbytes == arena_nbytes()) {
    return;
  }
  for (Tenant& tenant : tenants_) {
    tenant.last_use.synchronize();
  }
  tenants_.clear();
  arena_ = at::Tensor();  // before the new one: both may not fit
  if (nbytes > 0) {
    arena_ = at::empty(
        {nbytes},
        at::TensorOptions().dtype(at::kByte).device(device_));
    // Kernels of the previous owner may still use this memory, and other
    // streams will fill it.
    current_stream(device_)->synchronize();
  }
}

Slot SlotPool::acquire(
    std::int64_t offset,
    std::int64_t nbytes,
    const std::shared_ptr<Stream>& filler) {
  Slot slot{.nbytes = nbytes};
  const std::int64_t end = offset + nbytes;
  bool fits = offset >= 0 && end <= arena_nbytes();
  for (const Tenant& tenant : tenants_) {
    fits = fits && !(tenant.held && tenant.begin < end && offset < tenant.end);
  }
  if (fits) {
    for (Tenant& tenant : tenants_) {
      if (tenant.begin < end && offset < tenant.end) {
        tenant.last_use.wait(*filler);
      }
    }
    // A tenant that this use covers needs no waiting for any more.
    std::erase_if(tenants_, [&](const Tenant& t) {
      return t.begin >= offset && t.end <= end;
    });
    tenants_.push_back({offset, end, true, {}});
    slot.offset = offset;
    slot.data = static_cast<std::uint8_t*>(arena_.data_ptr()) + offset;
  } else {
    const auto allocate = [&] {
      slot.dynamic = at::empty(
          {nbytes},
          at::TensorOptions().dtype(at::kByte).device(device_));
    };
    if (device_.is_cuda()) {
      filler->submit(allocate);  // runs at once; the block is this stream's
    } else {
      allocate();
    }
    slot.data = slot.dynamic.data_ptr();
    dynamic_nbytes_ += nbytes;
    ++num_dynamic_;
  }
  ++num_held_;
  held_nbytes_ += nbytes;
  peak_held_nbytes_ = std::max(peak_held_nbytes_, held_nbytes_);
  return slot;
}

void SlotPool::release(
    Slot& slot,
    Event last_use,
    const std::shared_ptr<Stream>& filler) {
  FLATSHARD_CHECK(slot.held(), internal, "a slot was released twice");
  --num_held_;
  held_nbytes_ -= slot.nbytes;
  if (slot.dynamic.defined()) {
    dynamic_nbytes_ -= slot.nbytes;
    last_use.wait(*filler);
    filler->submit([memory = std::move(slot.dynamic)]() mutable {
      memory = at::Tensor();
    });
  } else {
    const auto tenant =
        std::find_if(tenants_.begin(), tenants_.end(), [&](const Tenant& t) {
          return t.held && t.begin == slot.offset;
        });
    FLATSHARD_CHECK(
        tenant != tenants_.end(),
        internal,
        "a slot is not of this arena");
    tenant->held = false;
    tenant->last_use = std::move(last_use);
  }
  slot = {};
}

void SlotPool::forget_uses() {
  std::erase_if(tenants_, [](const Tenant& tenant) { return !tenant.held; });
}

}  // namespace flatshard
