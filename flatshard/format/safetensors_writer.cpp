#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "flatshard/checkpoint/safetensors.h"
#include "flatshard/checkpoint/safetensors_format.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

constexpr std::size_t kAlignment = 64;

struct Sized {
  const SafetensorsSpec* spec;
  std::int64_t item_nbytes;
};

}  // namespace

SafetensorsWriter::SafetensorsWriter(
    std::filesystem::path path,
    const std::vector<SafetensorsSpec>& specs,
    const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)) {
  std::vector<Sized> order;
  for (const SafetensorsSpec& spec : specs) {
    FLATSHARD_CHECK(
        spec.name != kSafetensorsMetadata,
        usage,
        "a tensor cannot be named '{}' in a safetensors file",
        spec.name);
    order.push_back({&spec, safetensors_item_nbytes(spec.dtype)});
  }
  std::sort(order.begin(), order.end(), [](const Sized& a, const Sized& b) {
    return a.item_nbytes != b.item_nbytes ? a.item_nbytes > b.item_nbytes
                                          : a.spec->name < b.spec->name;
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    header[std::string(kSafetensorsMetadata)] = metadata;
  }
  std::uint64_t end = 0;
  for (const Sized& item : order) {
    const SafetensorsSpec& spec = *item.spec;
    Slot slot{.begin = end};
    FLATSHARD_CHECK(
        safetensors_nbytes(spec.shape, item.item_nbytes, slot.nbytes),
        usage,
        "tensor '{}': the shape has a negative size or too many elements",
        spec.name);
    end += slot.nbytes;
    FLATSHARD_CHECK(
        slots_.emplace(spec.name, slot).second,
        usage,
        "tensor '{}' is given twice",
        spec.name);
    header[spec.name] = {
        {"dtype", spec.dtype},
        {"shape", spec.shape},
        {"data_offsets", {slot.begin, end}}};
  }
  std::string text = header.dump();
  text.resize(
      (8 + text.size() + kAlignment - 1) / kAlignment * kAlignment - 8,
      ' ');
  FLATSHARD_CHECK(
      text.size() <= kSafetensorsMaxHeader,
      usage,
      "{}: a safetensors header may have {} bytes, got {}; write several files",
      path_.string(),
      kSafetensorsMaxHeader,
      text.size());

  const std::uint64_t header_nbytes = text.size();
  for (auto& [name, slot] : slots_) {
    slot.begin += 8 + header_nbytes;
  }
  partial_ = temporary_beside(path_);
  file_ = std::make_unique<FileWriter>(partial_);
  try {
    file_->write_at(0, &header_nbytes, 8);
    file_->write_at(8, text.data(), text.size());
    file_->resize(8 + header_nbytes + end);
  } catch (...) {
    ::unlink(partial_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_) {
    ::unlink(partial_.c_str());
  }
}

void SafetensorsWriter::write(
    std::string_view name,
    std::span<const std::byte> bytes,
    std::uint64_t offset) {
  FLATSHARD_CHECK(
      file_ != nullptr,
      usage,
      "{} is finished already",
      path_.string());
  const auto found = slots_.find(name);
  FLATSHARD_CHECK(
      found != slots_.end(),
      usage,
      "tensor '{}' was not announced for {}",
      name,
      path_.string());
  Slot& slot = found->second;
  FLATSHARD_CHECK(
      offset <= slot.nbytes && bytes.size() <= slot.nbytes - offset,
      usage,
      "tensor '{}' has {} bytes, but bytes [{}, {}) were to be written",
      name,
      slot.nbytes,
      offset,
      offset + bytes.size());
  file_->write_at(slot.begin + offset, bytes.data(), bytes.size());
  slot.written += bytes.size();
}

void SafetensorsWriter::finish() {
  FLATSHARD_CHECK(
      file_ != nullptr,
      usage,
      "{} is finished already",
      path_.string());
  for (const auto& [name, slot] : slots_) {
    FLATSHARD_CHECK(
        slot.written == slot.nbytes,
        usage,
        "tensor '{}' has {} bytes, but {} were written",
        name,
        slot.nbytes,
        slot.written);
  }
  file_->close();
  FLATSHARD_CHECK(
      ::rename(partial_.c_str(), path_.c_str()) == 0,
      io,
      "cannot rename {} to {}: {}",
      partial_.string(),
      path_.string(),
      std::strerror(errno));
  file_.reset();
  sync_folder(path_.parent_path());
}

}  // namespace flatshard
