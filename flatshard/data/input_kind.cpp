#include "flatshard/data/input_kind.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "flatshard/core/error.h"
#include "flatshard/data/byte_reader.h"
#include "flatshard/data/json_scanner.h"

namespace flatshard::data {
namespace {

using namespace std::string_view_literals;

constexpr std::size_t kHeadBytes = std::size_t{1} << 16;
// NULs are searched in these bytes, as git and grep do.
constexpr std::size_t kBinaryBytes = 8192;

struct Magic {
  std::string_view bytes;
  std::string_view what;
  std::size_t at = 0;
};

/// Files that hold data in a way that is not read here.
constexpr std::array kContainers{
    Magic{"PK\3\4"sv, "a zip archive; unpack it"},
    Magic{"PK\5\6"sv, "a zip archive; unpack it"},
    // Two literals, because \xfd7 would be one character.
    Magic{
        "\xfd"
        "7zXZ\0"sv,
        "xz data; unpack it with xz -d"},
    Magic{"BZh"sv, "bzip2 data; unpack it with bzip2 -d"},
    Magic{"\x04\x22\x4d\x18"sv, "lz4 data; unpack it with lz4 -d"},
    Magic{"\xff\x06\0\0sNaPpY"sv, "snappy data; unpack it"},
    Magic{"7z\xbc\xaf\x27\x1c"sv, "a 7z archive; unpack it"},
    Magic{"Rar!\x1a"sv, "a rar archive; unpack it"},
    Magic{"ustar"sv, "a tar archive; unpack it with tar -xf", 257},
    Magic{"%PDF-"sv, "a PDF; extract its text, for example with pdftotext"},
    Magic{"ARROW1"sv, "an Arrow file; write it as Parquet"},
    Magic{"FEA1"sv, "a Feather file; write it as Parquet"},
    Magic{"ORC"sv, "an ORC file; write it as Parquet"},
    Magic{"Obj\1"sv, "an Avro file; write it as Parquet"},
    Magic{"\x89HDF"sv, "an HDF5 file; write its texts as JSON lines"},
    Magic{
        "SQLite format 3\0"sv,
        "a SQLite database; write its texts as JSON lines"},
    Magic{"\x93NUMPY"sv, "a NumPy array; of tokens, see flatshard data import"},
    Magic{
        "MMIDIDX\0"sv,
        "an index of Megatron's tokens, which flatshard data import reads"},
    Magic{"PARE"sv, "encrypted Parquet; decrypt it"},
};

/// Ends of names that identify a format, whatever the first bytes are.
struct NameOf {
  std::string_view suffix;
  std::string_view what;
};
constexpr std::array kContainerNames{
    NameOf{".csv", "a table; write it as JSON lines or Parquet"},
    NameOf{".tsv", "a table; write it as JSON lines or Parquet"},
    NameOf{".xls", "a table; write it as JSON lines or Parquet"},
    NameOf{".xlsx", "a table; write it as JSON lines or Parquet"},
    NameOf{".arrow", "an Arrow file; write it as Parquet"},
    NameOf{".tar", "a tar archive; unpack it with tar -xf"},
    NameOf{".tgz", "a tar archive; unpack it with tar -xf"},
    NameOf{".zip", "a zip archive; unpack it"},
    NameOf{".bz2", "bzip2 data; unpack it with bzip2 -d"},
    NameOf{".xz", "xz data; unpack it with xz -d"},
    NameOf{".lz4", "lz4 data; unpack it with lz4 -d"},
    NameOf{".pdf", "a PDF; extract its text, for example with pdftotext"},
    NameOf{".doc", "a document of a word processor; extract its text"},
    NameOf{".docx", "a document of a word processor; extract its text"},
    NameOf{".tfrecord", "TensorFlow records; write them as JSON lines"},
    NameOf{".warc", "a web archive; extract its texts"},
    NameOf{".pkl", "a pickle; write its texts as JSON lines"},
    NameOf{".pickle", "a pickle; write its texts as JSON lines"},
    NameOf{".npy", "a NumPy array; of tokens, see flatshard data import"},
};

constexpr std::array kJsonNames{
    ".jsonl"sv,
    ".ndjson"sv,
    ".json"sv,
    ".jsonlines"sv,
    ".jl"sv,
    ".ldjson"sv};
constexpr std::array kCompressedNames{".gz"sv, ".gzip"sv, ".zst"sv, ".zstd"sv};

std::string lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return out;
}

bool ends_with_any(std::string_view name, const auto& suffixes) {
  return std::ranges::any_of(suffixes, [&](std::string_view suffix) {
    return name.ends_with(suffix);
  });
}

/// Returns the name in lower case without the end that marks compression.
std::string inner_name(const std::filesystem::path& path) {
  std::string name = lower(path.filename().string());
  for (const std::string_view suffix : kCompressedNames) {
    if (name.ends_with(suffix)) {
      name.resize(name.size() - suffix.size());
      break;
    }
  }
  return name;
}

std::string read_head(ByteReader& reader) {
  std::string head(kHeadBytes, '\0');
  std::size_t size = 0;
  while (size < head.size()) {
    const std::size_t n = reader.read(std::span(head).subspan(size));
    if (n == 0) {
      break;
    }
    size += n;
  }
  head.resize(size);
  return head;
}

bool has_byte_order_mark(std::string_view head) {
  return head.starts_with("\xff\xfe") || head.starts_with("\xfe\xff") ||
         head.starts_with("\xef\xbb\xbf");
}

/// Returns whether bytes look like text of Latin letters in UTF-16: nearly
/// every second byte is zero.
bool looks_like_utf16(std::string_view head) {
  std::array<std::size_t, 2> zeros{};
  for (std::size_t i = 0; i < head.size(); ++i) {
    zeros[i % 2] += head[i] == '\0' ? 1 : 0;
  }
  const std::size_t half = head.size() / 2;
  const std::size_t most = std::max(zeros[0], zeros[1]);
  const std::size_t least = std::min(zeros[0], zeros[1]);
  return half > 0 && 10 * most >= 7 * half && 20 * least <= half;
}

/// Returns whether a text begins with a line that is a JSON object, or with a
/// list of objects.
bool looks_like_rows(std::string_view head) {
  if (head.starts_with("\xef\xbb\xbf")) {
    head.remove_prefix(3);
  }
  JsonScanner list(head);
  if (list.take('[')) {
    return list.take('{') && list.peek() == '"';
  }
  JsonScanner scanner(head.substr(0, head.find('\n')));
  if (scanner.peek() != '{') {
    return false;
  }
  try {
    std::string text;
    return !scanner.object("", text).names.empty() && scanner.peek() == '\0';
  } catch (const JsonScanner::Problem&) {
    return false;
  }
}

[[noreturn]] void refuse(
    const std::filesystem::path& path,
    std::string_view what) {
  FLATSHARD_THROW(
      format,
      "{}: expected text, JSON rows or Parquet, got {}. Leave it out with a "
      "glob such as --input 'folder/**/*.txt', or name what it is with "
      "--format text, json, parquet or bytes",
      path.string(),
      what);
}

void check_no_pointer(
    const std::filesystem::path& path,
    std::string_view head) {
  FLATSHARD_CHECK(
      !head.starts_with("version https://git-lfs.github.com/spec/"),
      format,
      "{}: expected data, got a Git LFS pointer to it; fetch the data with "
      "git lfs pull",
      path.string());
  FLATSHARD_CHECK(
      !(head.starts_with("/annex/objects/") && head.size() < 4096),
      format,
      "{}: expected data, got a git-annex pointer to it; fetch the data with "
      "git annex get",
      path.string());
}

/// Returns the kind of a file whose bytes are neither rows nor a known
/// container.
KindOfFile kind_of_text(
    const std::filesystem::path& path,
    std::string_view name,
    std::string_view head,
    std::string compression) {
  KindOfFile found{.compression = std::move(compression)};
  if (ends_with_any(name, kJsonNames)) {
    found.kind = InputKind::json;
    return found;
  }
  if (!has_byte_order_mark(head)) {
    const std::string_view begin = head.substr(0, kBinaryBytes);
    if (begin.find('\0') != std::string_view::npos) {
      if (looks_like_utf16(begin)) {
        refuse(
            path,
            "UTF-16 without a byte order mark, as it seems; convert it, for "
            "example with iconv -f utf-16le -t utf-8");
      }
      found.not_text = "binary";
      return found;
    }
    if (name.ends_with(".pyc")) {
      found.not_text = "binary";
      return found;
    }
  }
  if (looks_like_rows(head)) {
    refuse(
        path,
        "a text that begins with a JSON object, so it may be one document or "
        "JSON rows (a name that ends in .jsonl marks the latter)");
  }
  return found;
}

}  // namespace

InputFormat parse_input_format(std::string_view name) {
  if (name == "auto" || name.empty()) {
    return InputFormat::automatic;
  }
  if (name == "text") {
    return InputFormat::text;
  }
  if (name == "json" || name == "jsonl") {
    return InputFormat::json;
  }
  if (name == "parquet") {
    return InputFormat::parquet;
  }
  FLATSHARD_CHECK(
      name == "bytes",
      config,
      "--format: expected auto, text, json, parquet or bytes, got '{}'",
      name);
  return InputFormat::bytes;
}

KindOfFile kind_of_file(const std::filesystem::path& path, InputFormat format) {
  const std::string raw = read_head(*ByteReader::open_raw(path));
  check_no_pointer(path, raw);
  if (format == InputFormat::bytes) {
    return {.kind = InputKind::bytes};
  }
  if (format == InputFormat::parquet || raw.starts_with("PAR1")) {
    return {.kind = InputKind::parquet};
  }
  const auto reader = ByteReader::open(path);
  const std::string compression(reader->compression());
  const std::string head = read_head(*reader);
  const std::string name = inner_name(path);
  if (format == InputFormat::json) {
    return {.kind = InputKind::json, .compression = compression};
  }
  if (format == InputFormat::text) {
    KindOfFile found{.compression = compression};
    if (!has_byte_order_mark(head) &&
        (name.ends_with(".pyc") ||
         std::string_view(head).substr(0, kBinaryBytes).find('\0') !=
             std::string_view::npos)) {
      found.not_text = "binary";
    }
    return found;
  }
  if (begins_gzip(head) || begins_zstd(head)) {
    refuse(path, "data that is compressed twice; unpack it once");
  }
  if (head.starts_with("PAR1")) {
    refuse(path, fmt::format("Parquet within {}; unpack it", compression));
  }
  const std::string_view container = container_of(path, head);
  if (!container.empty()) {
    refuse(path, container);
  }
  if (name.ends_with(".parquet") && !head.empty()) {
    refuse(path, "a .parquet file that does not begin as Parquet does");
  }
  return kind_of_text(path, name, head, compression);
}

std::string_view container_of(
    const std::filesystem::path& path,
    std::string_view head) {
  for (const Magic& magic : kContainers) {
    if (head.size() > magic.at &&
        head.substr(magic.at).starts_with(magic.bytes)) {
      return magic.what;
    }
  }
  const std::string name = inner_name(path);
  for (const NameOf& of : kContainerNames) {
    if (name.ends_with(of.suffix)) {
      return of.what;
    }
  }
  return {};
}

bool is_beside_data(std::string_view name) {
  constexpr std::array kStems{
      "readme"sv,
      "license"sv,
      "licence"sv,
      "copying"sv,
      "notice"sv,
      "citation"sv};
  constexpr std::array kNames{
      "dataset_infos.json"sv,
      "dataset_info.json"sv,
      "dataset_dict.json"sv,
      "croissant.json"sv,
      "_success"sv,
      "_metadata"sv,
      "_common_metadata"sv,
      "sha256sums"sv,
      "sha512sums"sv,
      "sha1sums"sv,
      "md5sums"sv,
      "thumbs.db"sv,
      "desktop.ini"sv};
  constexpr std::array kSuffixes{
      ".md5"sv,
      ".sha1"sv,
      ".sha256"sv,
      ".sha512"sv,
      ".crc"sv};
  const std::string text = lower(name);
  if (text.starts_with(".") ||
      std::ranges::find(kNames, text) != kNames.end() ||
      ends_with_any(text, kSuffixes)) {
    return true;
  }
  return std::ranges::any_of(kStems, [&](std::string_view stem) {
    if (!text.starts_with(stem)) {
      return false;
    }
    const std::string_view rest = std::string_view(text).substr(stem.size());
    // LICENSE-APACHE and README_de.md, and not licenses.jsonl or notice.jsonl.
    return rest.empty() || rest.front() == '-' || rest.front() == '_'
               ? rest.find(".json") == std::string_view::npos
               : rest == ".md" || rest == ".txt" || rest == ".rst" ||
                     rest == ".cff" || rest == ".html" || rest == ".bib";
  });
}

}  // namespace flatshard::data
