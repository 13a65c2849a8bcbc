#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "flatshard/core/error.h"
#include "flatshard/format/safetensors.h"

namespace flatshard {

SafetensorsWriter::SafetensorsWriter(
    std::filesystem::path path,
    const std::vector<SafetensorsSpec>& specs,
    const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)) {
  const SafetensorsLayout layout(specs, metadata, path_.string());
  for (const auto& [name, slot] : layout.slots()) {
    slots_[name] = {.begin = slot.begin, .nbytes = slot.nbytes};
  }
  partial_ = temporary_beside(path_);
  file_ = std::make_unique<FileWriter>(partial_);
  try {
    file_->write_at(0, layout.head().data(), layout.head().size());
    file_->resize(layout.nbytes());
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
