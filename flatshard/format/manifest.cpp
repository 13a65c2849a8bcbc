#include "flatshard/format/manifest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "flatshard/core/error.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/format/digest.h"
#include "flatshard/format/json_field.h"
#include "flatshard/format/safetensors_layout.h"

namespace flatshard {
namespace {

using nlohmann::json;
using Field = detail::JsonField;

constexpr std::string_view kFormat = "flatshard checkpoint";
// torch's tensors have at most as many.
constexpr std::size_t kMostDims = 64;

StoredFile parse_file(const Field& field) {
  StoredFile file;
  file.name = field.at("name").text();
  field.at("name").check(
      is_plain_file_name(file.name),
      "the name of a file in the same folder");
  file.nbytes = static_cast<std::uint64_t>(field.at("nbytes").count());
  const Field digests = field.at("digests");
  try {
    file.digests = digests_from_hex(digests.text());
  } catch (const Error& error) {
    FLATSHARD_THROW(format, "{}: {}", digests.where(), error.message());
  }
  FLATSHARD_CHECK(
      file.digests.size() == num_digest_blocks(file.nbytes),
      format,
      "{}: expected {} digests for {} bytes, got {}",
      digests.where(),
      num_digest_blocks(file.nbytes),
      file.nbytes,
      file.digests.size());
  return file;
}

std::vector<std::int64_t> parse_sizes(const Field& field) {
  std::vector<std::int64_t> sizes;
  field.each([&](const Field& size) { sizes.push_back(size.count()); });
  return sizes;
}

/// Returns the boxes of a piece, one after another: several only in version 1.
std::vector<Rectangle> parse_boxes(
    const Field& field,
    const StoredTensor& tensor,
    std::int64_t version) {
  if (version == 1) {
    const auto [begin, end] = field.at("elements").range();
    field.at("elements")
        .check(
            end <= tensor.numel(),
            fmt::format("elements of {}", tensor.numel()));
    return rectangles(tensor.shape, begin, end);
  }
  Rectangle box{
      parse_sizes(field.at("start")),
      parse_sizes(field.at("length"))};
  field.check(
      box.lies_in(tensor.shape),
      fmt::format(
          "start and length of a box in shape [{}]",
          fmt::join(tensor.shape, ", ")));
  return {std::move(box)};
}

std::uint64_t nbytes_of(const Rectangle& box, std::uint64_t item_nbytes) {
  return static_cast<std::uint64_t>(box.numel()) * item_nbytes;
}

/// Appends a piece to a tensor whose shape and dtype are already parsed.
void parse_piece(
    const Field& field,
    const std::vector<StoredFile>& files,
    std::int64_t version,
    StoredTensor& tensor) {
  const auto item =
      static_cast<std::uint64_t>(safetensors_item_nbytes(tensor.dtype));
  const auto boxes = parse_boxes(field, tensor, version);
  const std::int64_t index = field.at("file").count();
  field.at("file").check(
      index < static_cast<std::int64_t>(files.size()),
      fmt::format("an index below {}, the number of files", files.size()));
  const std::string entry = field.at("entry").text();
  const auto [begin, end] = field.at("bytes").range();
  const StoredFile& file = files[static_cast<std::size_t>(index)];
  field.at("bytes").check(
      static_cast<std::uint64_t>(end) <= file.nbytes,
      fmt::format("a range in the {} bytes of {}", file.nbytes, file.name));
  auto offset = static_cast<std::uint64_t>(begin);
  std::int64_t numel = 0;
  for (const Rectangle& box : boxes) {
    tensor.pieces.push_back({box, index, offset, entry});
    offset += nbytes_of(box, item);
    numel += box.numel();
  }
  field.at("bytes").check(
      offset == static_cast<std::uint64_t>(end),
      fmt::format("{} bytes for each of {} elements", item, numel));
}

bool by_start(const StoredPiece& a, const StoredPiece& b) {
  return a.box.start < b.box.start;
}

/// Sorts the pieces of a tensor. They have no element in common. With the
/// pieces of all ranks, every element is in one.
void check_coverage(
    StoredTensor& tensor,
    bool complete,
    const std::string& where) {
  std::stable_sort(tensor.pieces.begin(), tensor.pieces.end(), by_start);
  std::int64_t numel = 0;  // of boxes without common elements: fits 64 bits
  std::vector<const Rectangle*> open;  // may reach the next piece's first index
  for (const StoredPiece& piece : tensor.pieces) {
    const std::int64_t n = piece.box.numel();
    if (n == 0) {
      continue;
    }
    if (!piece.box.start.empty()) {
      std::erase_if(open, [&](const Rectangle* box) {
        return box->start[0] + box->length[0] <= piece.box.start[0];
      });
    }
    for (const Rectangle* box : open) {
      FLATSHARD_CHECK(
          box->intersection(piece.box).numel() == 0,
          format,
          "{}: expected pieces without a common element, got {} and {}",
          where,
          to_string(*box),
          to_string(piece.box));
    }
    open.push_back(&piece.box);
    numel += n;
  }
  FLATSHARD_CHECK(
      !complete || numel == tensor.numel(),
      format,
      "{}: expected pieces of all {} elements, got {} of them",
      where,
      tensor.numel(),
      numel);
}

StoredTensor parse_tensor(
    const Field& field,
    const std::vector<StoredFile>& files,
    std::int64_t version,
    bool complete) {
  StoredTensor tensor;
  tensor.dtype = field.at("dtype").text();
  std::int64_t item_nbytes = 0;
  try {
    item_nbytes = safetensors_item_nbytes(tensor.dtype);
  } catch (const Error& error) {
    FLATSHARD_THROW(format, "{}: {}", field.where(), error.message());
  }
  tensor.shape = parse_sizes(field.at("shape"));
  field.at("shape").check(
      tensor.shape.size() <= kMostDims,
      fmt::format("at most {} dimensions", kMostDims));
  std::uint64_t nbytes = 0;
  field.at("shape").check(
      safetensors_nbytes(tensor.shape, item_nbytes, nbytes),
      "sizes whose product fits 63 bits");
  field.at("pieces").each(
      [&](const Field& piece) { parse_piece(piece, files, version, tensor); });
  check_coverage(tensor, complete, field.where());
  return tensor;
}

/// No byte of a file belongs to two tensors.
void check_overlaps(const Manifest& manifest, const std::string& origin) {
  struct Range {
    std::int64_t file;
    std::uint64_t begin;
    std::uint64_t end;
    std::string what;
  };
  std::vector<Range> ranges;
  for (const auto& [role, tensors] : manifest.tensors) {
    for (const auto& [name, tensor] : tensors) {
      const auto item =
          static_cast<std::uint64_t>(safetensors_item_nbytes(tensor.dtype));
      for (const StoredPiece& piece : tensor.pieces) {
        const std::uint64_t nbytes = nbytes_of(piece.box, item);
        if (nbytes > 0) {
          ranges.push_back(
              {piece.file,
               piece.offset,
               piece.offset + nbytes,
               describe_tensor(role, name)});
        }
      }
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::tie(a.file, a.begin, a.end) < std::tie(b.file, b.begin, b.end);
  });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const Range& a = ranges[i - 1];
    const Range& b = ranges[i];
    FLATSHARD_CHECK(
        a.file != b.file || a.end <= b.begin,
        format,
        "{}: {} and {} overlap in {}: bytes [{}, {}) and [{}, {})",
        origin,
        a.what,
        b.what,
        manifest.files[static_cast<std::size_t>(a.file)].name,
        a.begin,
        a.end,
        b.begin,
        b.end);
  }
}

json to_object(const StoredTensor& tensor) {
  const auto item =
      static_cast<std::uint64_t>(safetensors_item_nbytes(tensor.dtype));
  json pieces = json::array();
  for (const StoredPiece& piece : tensor.pieces) {
    pieces.push_back(
        {{"start", piece.box.start},
         {"length", piece.box.length},
         {"file", piece.file},
         {"bytes", {piece.offset, piece.offset + nbytes_of(piece.box, item)}},
         {"entry", piece.entry}});
  }
  return {
      {"dtype", tensor.dtype},
      {"shape", tensor.shape},
      {"pieces", std::move(pieces)}};
}

/// `"key": value` lines between braces, so that a diff shows what differs.
template <class Map, class F>
std::string object_lines(const Map& map, const char* indent, F&& value) {
  std::string text = "{";
  for (const auto& [key, item] : map) {
    text += fmt::format(
        "{}\n{}  {}: {}",
        text.size() > 1 ? "," : "",
        indent,
        json(key).dump(),
        value(item));
  }
  return text + (map.empty() ? "}" : fmt::format("\n{}}}", indent));
}

}  // namespace

std::int64_t StoredTensor::numel() const {
  // This comes first, since the other sizes may be of any size when one is
  // zero.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
    return 0;
  }
  std::int64_t product = 1;
  for (const std::int64_t size : shape) {
    product *= size;
  }
  return product;
}

std::string describe_tensor(std::string_view role, std::string_view name) {
  return fmt::format("{} of {}", role, name);
}

bool is_plain_file_name(std::string_view text) {
  return !text.empty() && text != "." && text != ".." &&
         text.find('/') == std::string_view::npos &&
         text.find('\0') == std::string_view::npos;
}

std::string to_json(const Manifest& manifest) {
  const auto dump = [](const auto& value) { return json(value).dump(); };
  json files = json::array();
  for (const StoredFile& file : manifest.files) {
    files.push_back(
        {{"name", file.name},
         {"nbytes", file.nbytes},
         {"digests", digests_to_hex(file.digests)}});
  }
  std::string text = "{\n";
  text += fmt::format("  \"format\": {},\n", dump(kFormat));
  text += fmt::format("  \"version\": {},\n", kManifestVersion);
  text += fmt::format("  \"step\": {},\n", manifest.step);
  text += fmt::format("  \"mesh\": {},\n", dump(manifest.mesh));
  text += fmt::format("  \"strategy\": {},\n", dump(manifest.strategy));
  text += fmt::format(
      "  \"state\": {},\n",
      object_lines(manifest.state, "  ", dump));
  text += fmt::format(
      "  \"updates\": {},\n",
      object_lines(manifest.updates, "  ", dump));
  text += fmt::format(
      "  \"tensors\": {},\n",
      object_lines(manifest.tensors, "  ", [](const auto& tensors) {
        return object_lines(tensors, "    ", [](const StoredTensor& tensor) {
          return to_object(tensor).dump();
        });
      }));
  text += fmt::format("  \"files\": {}\n}}\n", files.dump());
  return text;
}

Manifest parse_manifest(
    std::string_view text,
    const std::string& origin,
    bool complete) {
  const json parsed = json::parse(text, nullptr, false);
  FLATSHARD_CHECK(
      parsed.is_object(),
      format,
      "{}: expected a JSON object, got {} bytes of something else; the file is "
      "truncated or damaged",
      origin,
      text.size());
  const Field root(parsed, origin);
  root.at("format").check(
      root.at("format").text() == kFormat,
      fmt::format("\"{}\"", kFormat));
  const std::int64_t version = root.at("version").count();
  FLATSHARD_CHECK(
      0 < version && version <= kManifestVersion,
      format,
      "{}: expected a version from 1 to {}, got {}; read it with the Flatshard "
      "that wrote it",
      origin,
      kManifestVersion,
      version);
  Manifest manifest;
  manifest.step = root.at("step").count();
  manifest.mesh = root.at("mesh").text();
  manifest.strategy = root.at("strategy").text();
  root.at("files").each([&](const Field& file) {
    manifest.files.push_back(parse_file(file));
    for (std::size_t i = 0; i + 1 < manifest.files.size(); ++i) {
      file.check(
          manifest.files[i].name != manifest.files.back().name,
          "every file once");
    }
  });
  root.at("tensors").each_key([&](const std::string& role, const Field& list) {
    auto& tensors = manifest.tensors[role];
    list.each_key([&](const std::string& name, const Field& tensor) {
      tensors[name] = parse_tensor(tensor, manifest.files, version, complete);
    });
  });
  root.at("updates").each_key(
      [&](const std::string& name, const Field& number) {
        manifest.updates[name] = number.count();
      });
  root.at("state").each_key([&](const std::string& name, const Field& value) {
    manifest.state[name] = value.text();
  });
  check_overlaps(manifest, origin);
  return manifest;
}

Manifest read_manifest(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kManifestName;
  return parse_manifest(MappedFile(path).text(), path.string());
}

Manifest merge_manifests(const std::vector<Manifest>& parts) {
  Manifest merged = parts.at(0);
  merged.files.clear();
  merged.tensors.clear();
  for (const Manifest& part : parts) {
    const auto first_file = static_cast<std::int64_t>(merged.files.size());
    merged.files.insert(
        merged.files.end(),
        part.files.begin(),
        part.files.end());
    for (const auto& [name, count] : part.updates) {
      std::int64_t& most = merged.updates[name];
      most = std::max(most, count);
    }
    for (const auto& [role, tensors] : part.tensors) {
      for (const auto& [name, tensor] : tensors) {
        StoredTensor& into =
            merged.tensors[role]
                .try_emplace(name, StoredTensor{tensor.dtype, tensor.shape, {}})
                .first->second;
        FLATSHARD_CHECK(
            into.dtype == tensor.dtype && into.shape == tensor.shape,
            format,
            "{}: ranks disagree on its dtype or shape",
            describe_tensor(role, name));
        for (StoredPiece piece : tensor.pieces) {
          piece.file += first_file;
          into.pieces.push_back(std::move(piece));
        }
      }
    }
  }
  for (auto& [role, tensors] : merged.tensors) {
    for (auto& [name, tensor] : tensors) {
      check_coverage(tensor, /*complete=*/true, describe_tensor(role, name));
    }
  }
  return merged;
}

}  // namespace flatshard
