#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/format/safetensors_format.h"

namespace flatshard {
namespace {

using nlohmann::json;

/// Parses the header and rejects duplicate tensor names. The JSON library does
/// not report duplicates.
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
      "{}: tensor '{}' occurs twice",
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

/// Returns a list of whole numbers >= 0 that fit int64, or an error.
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
      "{}: expected {} to be a list of integers, got {}",
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

std::uint64_t header_length(std::span<const std::byte> begin) {
  std::uint64_t nbytes = 0;
  std::memcpy(&nbytes, begin.data(), 8);
  return nbytes;
}

bool is_sound_length(std::uint64_t header_nbytes, std::uint64_t file_nbytes) {
  return header_nbytes <= kSafetensorsMaxHeader &&
         header_nbytes <= file_nbytes - 8;
}

// Returns the length of the header and the header. Returns only the length if
// it is invalid, and the available bytes of a shorter file.
std::vector<std::byte> read_begin(const FileReader& file) {
  const auto nbytes = static_cast<std::uint64_t>(file.nbytes());
  std::vector<std::byte> begin(std::min<std::uint64_t>(nbytes, 8));
  file.read_at(0, begin);
  if (begin.size() == 8 && is_sound_length(header_length(begin), nbytes)) {
    begin.resize(8 + header_length(begin));
    file.read_at(8, std::span(begin).subspan(8));
  }
  return begin;
}

}  // namespace

SafetensorsHeader parse_safetensors(
    std::span<const std::byte> begin,
    std::uint64_t nbytes,
    const std::string& file) {
  FLATSHARD_CHECK(
      nbytes >= 8,
      format,
      "{}: expected a safetensors file, got {} bytes",
      file,
      nbytes);
  const std::uint64_t header_nbytes = header_length(begin);
  FLATSHARD_CHECK(
      is_sound_length(header_nbytes, nbytes),
      format,
      "{}: the header should have {} bytes, but the file has {} after its "
      "length; it is truncated or not a safetensors file",
      file,
      header_nbytes,
      nbytes - 8);
  SafetensorsHeader parsed;
  parsed.data_begin = 8 + static_cast<std::size_t>(header_nbytes);
  const json header = parse_header(
      {reinterpret_cast<const char*>(begin.data()) + 8,
       static_cast<std::size_t>(header_nbytes)},
      file);
  for (const auto& [name, value] : header.items()) {
    if (name == kSafetensorsMetadata) {
      parsed.metadata = parse_metadata(value, file);
      continue;
    }
    parsed.entries.push_back(
        parse_entry(name, value, fmt::format("{}: tensor '{}'", file, name)));
  }
  std::sort(
      parsed.entries.begin(),
      parsed.entries.end(),
      [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
        return std::tie(a.begin, a.end, a.name) <
               std::tie(b.begin, b.end, b.name);
      });
  std::uint64_t expected = 0;
  for (const SafetensorsEntry& entry : parsed.entries) {
    FLATSHARD_CHECK(
        entry.begin == expected,
        format,
        "{}: tensor '{}' should start at byte {} of the data, but starts at {}",
        file,
        entry.name,
        expected,
        entry.begin);
    expected = entry.end;
  }
  FLATSHARD_CHECK(
      expected == nbytes - parsed.data_begin,
      format,
      "{}: the tensors have {} bytes, but the file has {} after its header; it "
      "is truncated or damaged",
      file,
      expected,
      nbytes - parsed.data_begin);
  return parsed;
}

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path)
    : file_(path),
      header_(parse_safetensors(
          read_begin(file_),
          static_cast<std::uint64_t>(file_.nbytes()),
          path.string())) {
  for (const SafetensorsEntry& entry : header_.entries) {
    index_[entry.name] = index_.size();
  }
}

bool SafetensorsReader::contains(std::string_view name) const {
  return index_.find(name) != index_.end();
}

const SafetensorsEntry& SafetensorsReader::entry(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    std::vector<std::string> names;
    for (const SafetensorsEntry& entry : header_.entries) {
      names.push_back(entry.name);
    }
    FLATSHARD_THROW(
        format,
        "{} has no tensor '{}'; the nearest name is '{}'",
        path().string(),
        name,
        nearest_name(name, names));
  }
  return header_.entries[found->second];
}

void SafetensorsReader::read(
    const SafetensorsEntry& entry,
    std::uint64_t begin,
    std::span<std::byte> out) const {
  FLATSHARD_CHECK(
      begin + out.size() <= entry.nbytes(),
      internal,
      "{}: tensor '{}': expected bytes within {}, got {} to {}",
      path().string(),
      entry.name,
      entry.nbytes(),
      begin,
      begin + out.size());
  file_.read_at(static_cast<std::int64_t>(offset(entry) + begin), out);
}

}  // namespace flatshard
