#include "flatshard/buffer/peer_buffer.h"

#include <ATen/ATen.h>

#include <utility>

#include "flatshard/buffer/transition.h"
#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"

namespace flatshard {

PeerBuffer::PeerBuffer(
    std::shared_ptr<const FlatLayout> layout,
    std::shared_ptr<Mesh> mesh,
    Placements placements,
    at::ScalarType dtype) {
  const Placements whole(placements.size(), Placement::replicate());
  const auto steps = plan_transition(placements, whole);
  FLATSHARD_CHECK(
      steps.size() == 1 &&
          steps.front().kind == TransitionStep::Kind::all_gather,
      internal,
      "expected a buffer that one all-gather unshards, got {}",
      to_string(placements));
  axes_ = steps.front().axes;
  use_mesh(*mesh);
  const std::int64_t numel =
      FlatBuffer::local_numel(*layout, *mesh, placements);
  const std::int64_t element = c10::elementSize(dtype);
  memory_ = PeerMemory::create(*group_, numel * element);
  local_ = FlatBuffer::wrap(
      memory_->local().view(dtype),
      layout,
      mesh,
      std::move(placements));

  // Each rank starts with the next rank, so that no two ranks read from the
  // same one.
  for (int i = 1; i <= memory_->size(); ++i) {
    const int rank = (memory_->rank() + i) % memory_->size();
    const auto* const theirs =
        static_cast<const char*>(memory_->of(rank).const_data_ptr());
    for (std::size_t s = 0; s < local_.local_ranges().size(); ++s) {
      const LocalRange& range = local_.local_ranges()[s];
      if (range.numel == 0) {
        continue;
      }
      // All parts of a segment have the same size as this rank's part.
      const std::int64_t segment = range.offset - memory_->rank() * range.numel;
      parts_.push_back(
          {.segment = static_cast<std::int64_t>(s),
           .offset = (segment + rank * range.numel) * element,
           .source = theirs + range.local_offset * element,
           .nbytes = range.numel * element});
    }
  }
}

void PeerBuffer::use_mesh(Mesh& mesh) {
  group_ = mesh.communicator(axes_, Purpose::gather).shared_from_this();
  writes_ = mesh.communicator(axes_, Purpose::reduce).shared_from_this();
}

void PeerBuffer::copy_whole(const at::Tensor& out) const {
  copy_segments(
      0,
      static_cast<std::int64_t>(local_.layout().segments().size()),
      out);
}

void PeerBuffer::copy_segments(
    std::int64_t first,
    std::int64_t count,
    const at::Tensor& out) const {
  const std::int64_t begin =
      local_.layout().segments().at(first).offset * local_.local().itemsize();
  auto* const to = static_cast<char*>(out.mutable_data_ptr());
  for (const Part& part : parts_) {
    if (part.segment >= first && part.segment < first + count) {
      copy_bytes(
          to + part.offset - begin,
          part.source,
          part.nbytes,
          local_.device());
    }
  }
}

}  // namespace flatshard
