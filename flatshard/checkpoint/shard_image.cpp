#include "flatshard/checkpoint/shard_image.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <cstring>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/core/error.h"
#include "flatshard/format/block_writer.h"
#include "flatshard/format/safetensors_layout.h"

namespace flatshard {
namespace {

/// The tensor's name in a safetensors file: with its role, unless that is the
/// weight, and with the elements, unless it is the whole tensor.
std::string entry_name(const OwnedRun& run, bool whole) {
  const std::string name = run.role == kWeightRole
                               ? run.names.front()
                               : run.role + "/" + run.names.front();
  return whole ? name : fmt::format("{}[{}:{}]", name, run.begin, run.end());
}

}  // namespace

ShardImage::ShardImage(
    std::vector<OwnedRun> runs,
    int rank,
    int world,
    std::uint64_t max_file_nbytes)
    : runs_(std::move(runs)) {
  std::vector<std::vector<std::size_t>> files(1);
  std::uint64_t file_nbytes = 0;
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const OwnedRun& run = runs_[i];
    part_.tensors[run.role].try_emplace(
        run.names.front(),
        StoredTensor{
            safetensors_dtype(run.values.scalar_type()),
            run.shape,
            {}});
    const auto nbytes = static_cast<std::uint64_t>(run.values.nbytes());
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
    std::span<const std::size_t> runs,
    const std::string& name) {
  std::vector<SafetensorsSpec> specs;
  std::vector<std::string> entries;
  for (const std::size_t i : runs) {
    const OwnedRun& run = runs_[i];
    const bool whole = run.values.numel() == c10::multiply_integers(run.shape);
    entries.push_back(entry_name(run, whole));
    specs.push_back(
        {entries.back(),
         safetensors_dtype(run.values.scalar_type()),
         whole ? run.shape : std::vector<std::int64_t>{run.values.numel()}});
  }
  const SafetensorsLayout layout(specs, {{"format", "pt"}}, name);
  const auto file = static_cast<std::int64_t>(part_.files.size());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const OwnedRun& run = runs_[runs[i]];
    const std::uint64_t offset = layout.slots().find(entries[i])->second.begin;
    part_.tensors[run.role][run.names.front()].pieces.push_back(
        {.begin = run.begin,
         .end = run.end(),
         .file = file,
         .offset = offset,
         .entry = entries[i]});
    places_.push_back({runs[i], nbytes_ + static_cast<std::int64_t>(offset)});
  }
  heads_.push_back({nbytes_, layout.head()});
  part_.files.push_back({name, layout.nbytes(), {}});
  // Each file begins where direct I/O can.
  constexpr auto kAlign = static_cast<std::int64_t>(kDirectAlignment);
  nbytes_ += static_cast<std::int64_t>(layout.nbytes());
  nbytes_ = (nbytes_ + kAlign - 1) / kAlign * kAlign;
}

void ShardImage::write_heads(const at::Tensor& buffer) const {
  for (const Head& head : heads_) {
    std::memcpy(
        static_cast<std::byte*>(buffer.data_ptr()) + head.begin,
        head.bytes.data(),
        head.bytes.size());
  }
}

void ShardImage::copy_runs(const at::Tensor& buffer) const {
  for (const Place& place : places_) {
    const at::Tensor& values = runs_[place.run].values;
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
