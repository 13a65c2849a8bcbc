#include "flatshard/checkpoint/shard_image.h"

#include <ATen/ATen.h>

#include <cstring>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/format/block_writer.h"
#include "flatshard/format/safetensors_layout.h"

namespace flatshard {
namespace {

/// Returns the tensor's name in a safetensors file: with its role, unless that
/// is the weight, and with the box, unless it is the full tensor.
std::string entry_name(const OwnedBox& owned) {
  const std::string name = owned.role == kWeightRole
                               ? owned.names.front()
                               : owned.role + "/" + owned.names.front();
  return owned.box == Rectangle::whole(owned.shape)
             ? name
             : name + to_string(owned.box);
}

}  // namespace

ShardImage::ShardImage(
    std::vector<OwnedBox> boxes,
    int rank,
    int world,
    std::uint64_t max_file_nbytes)
    : boxes_(std::move(boxes)) {
  std::vector<std::vector<std::size_t>> files(1);
  std::uint64_t file_nbytes = 0;
  for (std::size_t i = 0; i < boxes_.size(); ++i) {
    const OwnedBox& owned = boxes_[i];
    part_.tensors[owned.role].try_emplace(
        owned.names.front(),
        StoredTensor{
            safetensors_dtype(owned.values.scalar_type()),
            owned.shape,
            {}});
    const auto nbytes = static_cast<std::uint64_t>(owned.values.nbytes());
    if (nbytes == 0) {
      continue;
    }
    if (!files.back().empty() && file_nbytes + nbytes > max_file_nbytes) {
      files.emplace_back();
      file_nbytes = 0;
    }
    files.back().push_back(i);
    file_nbytes += nbytes;
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string more = i == 0 ? "" : fmt::format("-{}", i + 1);
    if (!files[i].empty()) {
      add_file(
          files[i],
          fmt::format(
              "shard-{:05}-of-{:05}{}.safetensors",
              rank + 1,
              world,
              more));
    }
  }
}

void ShardImage::add_file(
    std::span<const std::size_t> boxes,
    const std::string& name) {
  std::vector<SafetensorsSpec> specs;
  std::vector<std::string> entries;
  for (const std::size_t i : boxes) {
    const OwnedBox& owned = boxes_[i];
    entries.push_back(entry_name(owned));
    specs.push_back(
        {entries.back(),
         safetensors_dtype(owned.values.scalar_type()),
         owned.box.length});
  }
  const SafetensorsLayout layout(specs, {{"format", "pt"}}, name);
  const auto file = static_cast<std::int64_t>(part_.files.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const OwnedBox& owned = boxes_[boxes[i]];
    const std::uint64_t offset = layout.slots().find(entries[i])->second.begin;
    part_.tensors[owned.role][owned.names.front()].pieces.push_back(
        {.box = owned.box,
         .file = file,
         .offset = offset,
         .entry = entries[i]});
    places_.push_back({boxes[i], nbytes_ + static_cast<std::int64_t>(offset)});
  }
  heads_.push_back({nbytes_, layout.head()});
  part_.files.push_back({name, layout.nbytes(), {}});
  // Align the start of each file for direct I/O.
  constexpr auto kAlign = static_cast<std::int64_t>(kDirectAlignment);
  nbytes_ += static_cast<std::int64_t>(layout.nbytes());
  nbytes_ = round_up(nbytes_, kAlign);
}

void ShardImage::write_heads(const at::Tensor& buffer) const {
  for (const Head& head : heads_) {
    std::memcpy(
        static_cast<std::byte*>(buffer.data_ptr()) + head.begin,
        head.bytes.data(),
        head.bytes.size());
  }
}

void ShardImage::copy_boxes(
    const at::Tensor& buffer,
    const std::function<bool(const OwnedBox&)>& is_copied) const {
  for (const Place& place : places_) {
    if (!is_copied(boxes_[place.box])) {
      continue;
    }
    const at::Tensor& values = boxes_[place.box].values;
    const auto nbytes = static_cast<std::int64_t>(values.nbytes());
    buffer.narrow(0, place.begin, nbytes)
        .view(values.scalar_type())
        .copy_(values, /*non_blocking=*/true);
  }
}

std::span<const std::byte> ShardImage::file(
    const at::Tensor& buffer,
    std::size_t index) const {
  return {
      static_cast<const std::byte*>(buffer.data_ptr()) + heads_[index].begin,
      static_cast<std::size_t>(part_.files[index].nbytes)};
}

}  // namespace flatshard
