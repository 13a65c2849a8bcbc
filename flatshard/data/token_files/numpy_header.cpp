#include "flatshard/data/token_files/numpy_header.h"

#include <fmt/ranges.h>

#include <array>
#include <charconv>
#include <string_view>

#include "flatshard/core/error.h"

namespace flatshard::data {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kMagic = "\x93NUMPY"sv;

std::string
read_text(const FileReader& file, std::int64_t offset, std::int64_t nbytes) {
  std::string text(static_cast<std::size_t>(nbytes), '\0');
  file.read_at(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Returns the value of a key of the header, which is a Python dict such as
/// {'descr': '<u2', 'fortran_order': False, 'shape': (3, 4), }.
std::string_view value_of(std::string_view header, std::string_view key) {
  const std::size_t at = header.find(fmt::format("'{}':", key));
  if (at == std::string_view::npos) {
    return {};
  }
  std::string_view value = header.substr(at + key.size() + 3);
  value.remove_prefix(std::min(value.find_first_not_of(' '), value.size()));
  const char end = value.starts_with('(')    ? ')'
                   : value.starts_with('\'') ? '\''
                                             : ',';
  const std::size_t last = value.find(end, 1);
  return value.substr(0, end == ',' ? last : last + 1);
}

/// Parses "(3, 4)", "(7,)" and "()".
std::optional<std::vector<std::int64_t>> parse_shape(std::string_view text) {
  if (!text.starts_with('(') || !text.ends_with(')')) {
    return std::nullopt;
  }
  text = text.substr(1, text.size() - 2);
  std::vector<std::int64_t> shape;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(','));
    text.remove_prefix(std::min(word.size() + 1, text.size()));
    const std::size_t begin = word.find_first_not_of(' ');
    if (begin == std::string_view::npos) {
      continue;
    }
    std::int64_t size = -1;
    const char* end = word.data() + word.size();
    const auto parsed = std::from_chars(word.data() + begin, end, size);
    if (parsed.ec != std::errc() || parsed.ptr != end || size < 0) {
      return std::nullopt;
    }
    shape.push_back(size);
  }
  return shape;
}

/// Returns the type of a descr such as '<u2'; null for others.
const WordType* type_of(std::string_view descr) {
  if (descr.size() != 5 || descr[0] != '\'' || descr[4] != '\'' ||
      (descr[2] != 'u' && descr[2] != 'i') ||
      (descr[1] != '<' && descr[1] != '|')) {
    return nullptr;
  }
  const std::int64_t nbytes = descr[3] - '0';
  return find_word_type(
      fmt::format("{}int{}", descr[2] == 'u' ? "u" : "", nbytes * 8));
}

}  // namespace

std::optional<NumpyHeader> read_numpy_header(const FileReader& file) {
  constexpr std::int64_t kFixedBytes = 12;  // of versions 2 and 3
  if (file.nbytes() < kFixedBytes) {
    return std::nullopt;
  }
  const std::string fixed = read_text(file, 0, kFixedBytes);
  if (!fixed.starts_with(kMagic)) {
    return std::nullopt;
  }
  const auto byte = [&](std::size_t i) {
    return static_cast<std::int64_t>(static_cast<unsigned char>(fixed[i]));
  };
  const std::int64_t version = byte(6);
  const std::int64_t begin = version == 1 ? 10 : kFixedBytes;
  std::int64_t length = byte(8) + (byte(9) << 8);
  if (version > 1) {
    length += (byte(10) << 16) + (byte(11) << 24);
  }
  FLATSHARD_CHECK(
      version >= 1 && version <= 3 && begin + length <= file.nbytes(),
      format,
      "{}: expected a header of NumPy's version 1 to 3, got version {} and {} "
      "bytes in a file of {}",
      file.path().string(),
      version,
      length,
      file.nbytes());
  const std::string text = read_text(file, begin, length);
  const std::string_view descr = value_of(text, "descr");
  NumpyHeader header{.type = type_of(descr), .nbytes = begin + length};
  FLATSHARD_CHECK(
      header.type != nullptr,
      format,
      "{}: expected an array of little-endian integers, got the NumPy type {}; "
      "convert the tokens, for example with array.astype('<u4')",
      file.path().string(),
      descr);
  const auto shape = parse_shape(value_of(text, "shape"));
  FLATSHARD_CHECK(
      shape.has_value(),
      format,
      "{}: expected a shape in NumPy's header, got {}",
      file.path().string(),
      value_of(text, "shape"));
  header.shape = *shape;
  FLATSHARD_CHECK(
      header.shape.size() < 2 || value_of(text, "fortran_order") == "False",
      format,
      "{}: expected an array in C order, got {} in Fortran order; save "
      "numpy.ascontiguousarray of it",
      file.path().string(),
      value_of(text, "shape"));
  for (const std::int64_t size : header.shape) {
    FLATSHARD_CHECK(
        size == 0 || header.num_elements <= file.nbytes() / size,
        format,
        "{}: expected an array of the shape {}, and the file has {} bytes; "
        "fetch the file again",
        file.path().string(),
        value_of(text, "shape"),
        file.nbytes());
    header.num_elements *= size;
  }
  return header;
}

}  // namespace flatshard::data
