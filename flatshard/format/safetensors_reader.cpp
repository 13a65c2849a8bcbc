#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "flatshard/checkpoint/safetensors.h"
#include "flatshard/checkpoint/safetensors_format.h"
#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"

namespace flatshard {
namespace {

using nlohmann::json;

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

/// Parses the header and refuses a tensor named twice, which the JSON library
/// alone would let pass.
json parse_header(std::string_view text, const std::string& file) {
  std::set<std::string> names;
  std::string twice;
  const json header = json::parse(
      text,
      [&](int depth, json::parse_event_t event, json& parsed) {
        if (event == json::parse_event_t::key && depth == 1 &&
            !names.insert(parsed.get<std::string>()).second) {
          twice = parsed.get<std::string>();
        }
        return true;
      },
      false);
  FLATSHARD_CHECK(
      header.is_object(),
      format,
      "{}: the safetensors header is not a JSON object",
      file);
  FLATSHARD_CHECK(
      twice.empty(),
      format,
      "{}: tensor '{}' stands twice",
      file,
      twice);
  return header;
}

std::map<std::string, std::string> parse_metadata(
    const json& value,
    const std::string& file) {
  std::map<std::string, std::string> metadata;
  bool ok = value.is_object();
  if (ok) {
    for (const auto& [key, text] : value.items()) {
      ok = ok && text.is_string();
      if (ok) {
        metadata[key] = text.get<std::string>();
      }
    }
  }
  FLATSHARD_CHECK(
      ok,
      format,
      "{}: expected __metadata__ to map text to text, got {}",
      file,
      value.dump());
  return metadata;
}

/// A list of whole numbers >= 0 that fit int64, or an error.
std::vector<std::int64_t>
parse_numbers(const json& object, const char* key, const std::string& where) {
  std::vector<std::int64_t> numbers;
  const auto found = object.find(key);
  bool ok = found != object.end() && found->is_array();
  if (ok) {
    for (const json& item : *found) {
      ok = ok && item.is_number_unsigned() &&
           item.get<std::uint64_t>() <= INT64_MAX;
      numbers.push_back(ok ? item.get<std::int64_t>() : 0);
    }
  }
  FLATSHARD_CHECK(
      ok,
      format,
      "{}: expected {} to be a list of whole numbers, got {}",
      where,
      key,
      found == object.end() ? "nothing" : found->dump());
  return numbers;
}

SafetensorsEntry parse_entry(
    const std::string& name,
    const json& value,
    const std::string& where) {
  FLATSHARD_CHECK(
      value.is_object() && value.contains("dtype") &&
          value["dtype"].is_string(),
      format,
      "{}: expected an object with dtype, shape and data_offsets, got {}",
      where,
      value.dump());
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = value["dtype"].get<std::string>();
  entry.shape = parse_numbers(value, "shape", where);
  const auto offsets = parse_numbers(value, "data_offsets", where);
  FLATSHARD_CHECK(
      offsets.size() == 2 && offsets[0] <= offsets[1],
      format,
      "{}: expected data_offsets [begin, end], got {}",
      where,
      value["data_offsets"].dump());
  entry.begin = static_cast<std::uint64_t>(offsets[0]);
  entry.end = static_cast<std::uint64_t>(offsets[1]);
  std::uint64_t nbytes = 0;
  const std::int64_t item = safetensors_item_nbytes(entry.dtype);
  FLATSHARD_CHECK(
      safetensors_nbytes(entry.shape, item, nbytes) && nbytes == entry.nbytes(),
      format,
      "{}: dtype {} and shape {} do not fit the {} bytes of data_offsets",
      where,
      entry.dtype,
      value["shape"].dump(),
      entry.nbytes());
  return entry;
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
  // A zero anywhere makes the whole empty, whatever the others are.
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

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path)
    : path_(path), file_(path) {
  const std::string file = path.string();
  const auto bytes = file_.bytes();
  FLATSHARD_CHECK(
      bytes.size() >= 8,
      format,
      "{}: expected a safetensors file, got {} bytes",
      file,
      bytes.size());
  std::uint64_t header_nbytes = 0;
  std::memcpy(&header_nbytes, bytes.data(), 8);
  FLATSHARD_CHECK(
      header_nbytes <= kSafetensorsMaxHeader &&
          header_nbytes <= bytes.size() - 8,
      format,
      "{}: the header should have {} bytes, but the file has {} after its "
      "length; it is cut off or not a safetensors file",
      file,
      header_nbytes,
      bytes.size() - 8);
  data_begin_ = 8 + static_cast<std::size_t>(header_nbytes);
  const json header = parse_header(
      {reinterpret_cast<const char*>(bytes.data()) + 8,
       static_cast<std::size_t>(header_nbytes)},
      file);
  for (const auto& [name, value] : header.items()) {
    if (name == kSafetensorsMetadata) {
      metadata_ = parse_metadata(value, file);
      continue;
    }
    entries_.push_back(
        parse_entry(name, value, fmt::format("{}: tensor '{}'", file, name)));
  }
  std::sort(
      entries_.begin(),
      entries_.end(),
      [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
        return std::tie(a.begin, a.end, a.name) <
               std::tie(b.begin, b.end, b.name);
      });
  std::uint64_t expected = 0;
  for (const SafetensorsEntry& entry : entries_) {
    FLATSHARD_CHECK(
        entry.begin == expected,
        format,
        "{}: tensor '{}' should begin at byte {} of the data, but begins at {}",
        file,
        entry.name,
        expected,
        entry.begin);
    expected = entry.end;
    index_[entry.name] = index_.size();
  }
  FLATSHARD_CHECK(
      expected == bytes.size() - data_begin_,
      format,
      "{}: the tensors have {} bytes, but the file has {} after its header; it "
      "is cut off or damaged",
      file,
      expected,
      bytes.size() - data_begin_);
}

bool SafetensorsReader::contains(std::string_view name) const {
  return index_.find(name) != index_.end();
}

const SafetensorsEntry& SafetensorsReader::entry(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    std::vector<std::string> names;
    for (const SafetensorsEntry& entry : entries_) {
      names.push_back(entry.name);
    }
    FLATSHARD_THROW(
        format,
        "{} has no tensor '{}'; the nearest name is '{}'",
        path_.string(),
        name,
        nearest_name(name, names));
  }
  return entries_[found->second];
}

std::span<const std::byte> SafetensorsReader::data(
    const SafetensorsEntry& entry) const {
  return file_.bytes().subspan(
      data_begin_ + static_cast<std::size_t>(entry.begin),
      static_cast<std::size_t>(entry.nbytes()));
}

}  // namespace flatshard
