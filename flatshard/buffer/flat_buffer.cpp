#include "flatshard/buffer/flat_buffer.h"

#include <ATen/Functions.h>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

void check_owners(
    const std::shared_ptr<const FlatLayout>& layout,
    const std::shared_ptr<Mesh>& mesh) {
  FLATSHARD_CHECK(
      layout && mesh,
      usage,
      "a FlatBuffer needs a layout and a mesh");
}

}  // namespace

FlatBuffer::FlatBuffer(
    std::shared_ptr<const FlatLayout> layout,
    std::shared_ptr<Mesh> mesh,
    Placements placements,
    at::ScalarType dtype) {
  check_owners(layout, mesh);
  const std::int64_t numel = local_numel(*layout, *mesh, placements);
  const auto options = at::TensorOptions(dtype).device(mesh->device());
  *this =
      wrap(at::empty({numel}, options), layout, mesh, std::move(placements));
}

FlatBuffer FlatBuffer::wrap(
    at::Tensor local,
    std::shared_ptr<const FlatLayout> layout,
    std::shared_ptr<Mesh> mesh,
    Placements placements) {
  check_owners(layout, mesh);
  const std::int64_t expected = local_numel(*layout, *mesh, placements);
  FLATSHARD_CHECK(
      local.defined() && local.dim() == 1 && local.is_contiguous() &&
          local.numel() == expected,
      usage,
      "a FlatBuffer {} on {} expected a contiguous 1-D tensor of {} elements, "
      "got {}",
      flatshard::to_string(placements),
      mesh->to_string(),
      expected,
      local.defined() ? fmt::format(
                            "{} elements in {} dimensions",
                            local.numel(),
                            local.dim())
                      : "none");
  FlatBuffer result;
  result.ranges_ = flatshard::local_ranges(
      *layout,
      placements,
      mesh->axis_sizes(),
      mesh->coordinates());
  result.layout_ = std::move(layout);
  result.mesh_ = std::move(mesh);
  result.placements_ = std::move(placements);
  result.local_ = std::move(local);
  return result;
}

std::int64_t FlatBuffer::local_numel(
    const FlatLayout& layout,
    const Mesh& mesh,
    const Placements& placements) {
  return flatshard::local_numel(layout, placements, mesh.axis_sizes());
}

at::Tensor FlatBuffer::view(std::int64_t i) const {
  FLATSHARD_CHECK(
      local_.numel() == layout_->numel(),
      usage,
      "{}: the full tensor '{}' is available only if no axis is sharded; use "
      "local_pieces",
      to_string(),
      layout_->spec(i).name);
  return local_.narrow(0, layout_->tensor_offset(i), layout_->tensor_numel(i))
      .view(layout_->spec(i).shape);
}

std::vector<Piece> FlatBuffer::local_pieces(std::int64_t i) const {
  const ShardSpan span = shard_span(
      layout_->num_shards(),
      placements_,
      mesh_->axis_sizes(),
      mesh_->coordinates());
  return layout_->shard_pieces(i, span);
}

std::string FlatBuffer::to_string() const {
  return fmt::format(
      "FlatBuffer {} on {}, {} {}, {} of {} elements",
      flatshard::to_string(placements_),
      mesh_->to_string(),
      c10::toString(dtype()),
      device().str(),
      local_.numel(),
      layout_->numel());
}

std::optional<at::Tensor> FlatBuffer::slice_view(
    const std::vector<LocalRange>& part) const {
  if (ranges_.size() != 1) {
    return std::nullopt;
  }
  const std::int64_t begin = part.front().offset - ranges_.front().offset;
  const std::int64_t numel = part.front().numel;
  if (begin < 0 || begin + numel > local_.numel()) {
    return std::nullopt;
  }
  return local_.narrow(0, begin, numel);
}

}  // namespace flatshard
