#include "flatshard/runtime/kept_activations.h"

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/memory.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace flatshard {
namespace {

/// As aligned as what the GPU's allocator returns.
constexpr std::int64_t kAlignment = 512;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

}  // namespace

KeptActivations::KeptActivations(at::Device device, StreamOptions streams)
    : device_(device),
      download_(make_stream(device, "download", streams)),
      upload_(make_stream(device, "upload", streams)) {
}

KeptActivations::~KeptActivations() {
  reset();
}

bool KeptActivations::can_leave(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.is_floating_point() && tensor.numel() > 0 &&
         tensor.device() == device_ && tensor.layout() == at::kStrided &&
         !tensor.is_inference() && tensor.is_non_overlapping_and_dense();
}

std::int64_t KeptActivations::nbytes_of(const at::Tensor& tensor) {
  return round_up(static_cast<std::int64_t>(tensor.nbytes()), kAlignment);
}

std::size_t KeptActivations::add(CallId call, at::Tensor tensor) {
  Call& kept = calls_[call];
  // A graph may end first, so not with it, but with its version.
  tensor = tensor.detach();
  kept.tensors.push_back(
      {.device = tensor,
       .version = tensor._version(),
       .sizes = tensor.sizes().vec(),
       .strides = tensor.strides().vec(),
       .dtype = tensor.scalar_type(),
       .begin = kept.nbytes,
       .nbytes = static_cast<std::int64_t>(tensor.nbytes())});
  kept.nbytes += nbytes_of(tensor);
  return kept.tensors.size() - 1;
}

bool KeptActivations::remove_reader(CallId call) {
  const auto found = calls_.find(call);
  return found != calls_.end() && --found->second.num_readers == 0;
}

void KeptActivations::check_unchanged(const Moved& moved) {
  FLATSHARD_CHECK(
      moved.device._version() == moved.version,
      usage,
      "activation offload: a tensor of shape {} that a recomputed part keeps "
      "was modified in place after the part had read it; write into a copy, or "
      "turn activation_checkpoint.offload off",
      c10::str(c10::IntArrayRef(moved.sizes)));
}

at::Tensor KeptActivations::tensor(CallId call, std::size_t number) const {
  const auto found = calls_.find(call);
  FLATSHARD_CHECK(
      found != calls_.end(),
      usage,
      "activation offload: a backward reads what was dropped by a reset after "
      "an exception; run the forward again");
  const Moved& moved = found->second.tensors.at(number);
  if (moved.device.defined()) {
    check_unchanged(moved);
    return moved.device.detach();
  }
  FLATSHARD_CHECK(
      found->second.awaited,
      internal,
      "a backward reads a kept tensor that was not loaded");
  return found->second.memory.narrow(0, moved.begin, moved.nbytes)
      .view(moved.dtype)
      .as_strided(moved.sizes, moved.strides);
}

KeptActivations::Call& KeptActivations::find(CallId call) {
  const auto found = calls_.find(call);
  FLATSHARD_CHECK(
      found != calls_.end(),
      internal,
      "call {} keeps nothing that could be moved",
      call);
  return found->second;
}

int KeptActivations::take_place(std::int64_t nbytes) {
  const auto free = std::ranges::find(places_, false, &Place::is_used);
  const auto number = static_cast<int>(free - places_.begin());
  Place& place = free == places_.end() ? places_.emplace_back() : *free;
  if (!place.memory.defined() || place.memory.numel() < nbytes) {
    place.written.synchronize();
    place.read.synchronize();
    place.memory.reset();  // before the next one exists
    place.memory = host_buffer(nbytes, device_);
  }
  place.is_used = true;
  return number;
}

void KeptActivations::download(CallId call) {
  Call& kept = find(call);
  kept.place = take_place(kept.nbytes);
  Place& place = places_[kept.place];
  std::vector<BytesCopy> copies;
  for (const Moved& moved : kept.tensors) {
    copies.push_back(
        {.to = bytes_of(place.memory) + moved.begin,
         .from = moved.device.data_ptr(),
         .nbytes = moved.nbytes});
  }
  // Compute has queued the kernels that wrote them, and has waited for all
  // copies from and to the place.
  Event computed;
  computed.record(*current_stream(device_));
  computed.wait(*download_);
  download_->submit([copies = std::move(copies), device = device_] {
    for (const BytesCopy& copy : copies) {
      copy_bytes(copy.to, copy.from, copy.nbytes, device);
    }
  });
  kept.downloaded.record(*download_);
  place.written = kept.downloaded;
}

void KeptActivations::drain_download(CallId call) {
  Call& kept = find(call);
  kept.downloaded.wait(*current_stream(device_));
  kept.drained = true;
  for (Moved& moved : kept.tensors) {
    check_unchanged(moved);
    moved.device.reset();
  }
}

void KeptActivations::upload(CallId call) {
  Call& kept = find(call);
  kept.memory =
      at::empty({kept.nbytes}, at::TensorOptions(at::kByte).device(device_));
  // Earlier work of compute may still use the memory. Compute has waited for
  // the download as well.
  Event allocated;
  allocated.record(*current_stream(device_));
  allocated.wait(*upload_);
  Place& place = places_[kept.place];
  upload_->submit([to = kept.memory.data_ptr(),
                   from = place.memory.data_ptr(),
                   nbytes = kept.nbytes,
                   device = device_] { copy_bytes(to, from, nbytes, device); });
  kept.uploaded.record(*upload_);
  place.read = kept.uploaded;
}

void KeptActivations::await_upload(CallId call) {
  Call& kept = find(call);
  kept.uploaded.wait(*current_stream(device_));
  kept.awaited = true;
}

void KeptActivations::release(CallId call) {
  const auto found = calls_.find(call);
  if (found == calls_.end()) {
    return;
  }
  Call& kept = found->second;
  const auto compute = current_stream(device_);
  if (!kept.drained) {
    kept.downloaded.wait(*compute);
  }
  if (!kept.awaited) {
    kept.uploaded.wait(*compute);
  }
  if (kept.place >= 0) {
    places_[kept.place].is_used = false;
  }
  calls_.erase(found);
}

void KeptActivations::reset() noexcept {
  download_->reset();
  upload_->reset();
  calls_.clear();
  for (Place& place : places_) {
    place.is_used = false;
    place.written = {};
    place.read = {};
  }
}

std::int64_t KeptActivations::host_nbytes() const {
  std::int64_t sum = 0;
  for (const Place& place : places_) {
    sum += place.memory.numel();
  }
  return sum;
}

}  // namespace flatshard
