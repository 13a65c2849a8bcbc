#include "flatshard/format/safetensors_layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/format/safetensors_format.h"

namespace flatshard {
namespace {

constexpr std::size_t kAlignment = 64;

struct Dtype {
  std::string_view name;
  std::int64_t nbytes;
};

constexpr std::array<Dtype, 16> kDtypes{
    {{"BOOL", 1},
     {"U8", 1},
     {"I8", 1},
     {"F8_E4M3", 1},
     {"F8_E5M2", 1},
     {"F8_E8M0", 1},
     {"U16", 2},
     {"I16", 2},
     {"F16", 2},
     {"BF16", 2},
     {"U32", 4},
     {"I32", 4},
     {"F32", 4},
     {"U64", 8},
     {"I64", 8},
     {"F64", 8}}};

struct Sized {
  const SafetensorsSpec* spec;
  std::int64_t item_nbytes;
};

std::vector<Sized> in_file_order(const std::vector<SafetensorsSpec>& specs) {
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
  return order;
}

}  // namespace

std::int64_t safetensors_item_nbytes(std::string_view dtype) {
  std::vector<std::string_view> names;
  for (const Dtype& known : kDtypes) {
    if (known.name == dtype) {
      return known.nbytes;
    }
    names.push_back(known.name);
  }
  FLATSHARD_THROW(
      format,
      "unknown safetensors dtype '{}'; known are {}",
      dtype,
      fmt::join(names, ", "));
}

bool safetensors_nbytes(
    const std::vector<std::int64_t>& shape,
    std::int64_t item_nbytes,
    std::uint64_t& nbytes) {
  // A zero in any dimension makes the tensor empty, whatever the others are.
  std::int64_t product = item_nbytes;
  bool overflow = false;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) {
      return false;
    }
    empty = empty || size == 0;
    overflow = overflow || __builtin_mul_overflow(product, size, &product);
  }
  nbytes = empty ? 0 : static_cast<std::uint64_t>(product);
  return empty || !overflow;
}

SafetensorsLayout::SafetensorsLayout(
    const std::vector<SafetensorsSpec>& specs,
    const std::map<std::string, std::string>& metadata,
    const std::string& file) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    header[std::string(kSafetensorsMetadata)] = metadata;
  }
  std::uint64_t end = 0;
  for (const Sized& item : in_file_order(specs)) {
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
  text.resize(round_up(8 + text.size(), kAlignment) - 8, ' ');
  FLATSHARD_CHECK(
      text.size() <= kSafetensorsMaxHeader,
      usage,
      "{}: a safetensors header may have {} bytes, got {}; write several files",
      file,
      kSafetensorsMaxHeader,
      text.size());
  const std::uint64_t length = text.size();
  head_.resize(8);
  std::memcpy(head_.data(), &length, 8);
  head_ += text;
  nbytes_ = head_.size() + end;
  for (auto& [name, slot] : slots_) {
    slot.begin += head_.size();
  }
}

}  // namespace flatshard
