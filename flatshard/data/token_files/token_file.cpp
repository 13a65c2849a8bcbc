#include "flatshard/data/token_files/token_file.h"

#include <algorithm>
#include <array>

#include "flatshard/core/error.h"
#include "flatshard/data/input_kind.h"
#include "flatshard/data/token_files/numpy_header.h"

namespace flatshard::data {
namespace {

using namespace std::string_view_literals;

constexpr std::int64_t kLlmcHeaderBytes = 256 * 4;
constexpr std::int32_t kLlmcUint16 = 20240520;
constexpr std::int32_t kLlmcUint32 = 20240801;
constexpr std::string_view kIndexMagic("MMIDIDX\0\0", 9);

template <class T>
T read_value(const FileReader& file, std::int64_t offset) {
  T value{};
  file.read_at(offset, std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

/// Formats of other programs that hold tokens, or that users have next to them.
struct Foreign {
  std::string_view magic;
  std::string_view what;
};
constexpr std::array kForeign{
    Foreign{
        "LITPKDS"sv,
        "a packed file of litgpt, with a header of 24 bytes and padding; save "
        "the tokens with numpy.save"},
    Foreign{"MMIDIDX\0"sv, "the index of Megatron's tokens; name its .bin"},
    Foreign{"PAR1"sv, "Parquet, which flatshard data prepare reads"},
    Foreign{"\x1f\x8b"sv, "gzip data; unpack it with gzip -d"},
    Foreign{"\x28\xb5\x2f\xfd"sv, "zstd data; unpack it with zstd -d"},
    Foreign{"\x80\x04\x95"sv, "a pickle; save the tokens with numpy.save"},
    // llm.c's models, optimizer states, tokenizers and evaluations.
    Foreign{"\x26\xd8\x34\x01"sv, "a model of llm.c"},
    Foreign{"\x27\xd8\x34\x01"sv, "a state of llm.c"},
    Foreign{"\x28\xd8\x34\x01"sv, "a tokenizer of llm.c"},
    Foreign{"\x8a\xd8\x34\x01"sv, "an evaluation of llm.c"}};

bool is_text(std::string_view head) {
  return std::ranges::all_of(head, [](unsigned char c) {
    return (c >= ' ' && c < 0x7f) || c == '\n' || c == '\r' || c == '\t';
  });
}

}  // namespace

TokenFile::TokenFile(const std::filesystem::path& path, std::string_view dtype)
    : words_(path) {
  FLATSHARD_CHECK(
      dtype.empty() || find_word_type(dtype) != nullptr,
      config,
      "--dtype: expected a type of integers such as uint16, uint32 or int64, "
      "got '{}'",
      dtype);
  if (!open_llm_c() && !open_numpy() && !open_megatron()) {
    check_raw(dtype);
    open_raw(find_word_type(dtype.empty() ? "uint16" : dtype));
  }
  FLATSHARD_CHECK(
      num_tokens_ > 0,
      format,
      "{}: expected tokens, got none",
      path.string());
}

bool TokenFile::open_llm_c() {
  if (words_.nbytes() < kLlmcHeaderBytes) {
    return false;
  }
  const auto magic = read_value<std::int32_t>(words_, 0);
  if (magic != kLlmcUint16 && magic != kLlmcUint32) {
    return false;
  }
  type_ = find_word_type(magic == kLlmcUint16 ? "uint16" : "uint32");
  what_ = fmt::format("llm.c {}", type_->name);
  num_tokens_ = read_value<std::int32_t>(words_, 8);
  data_begin_ = kLlmcHeaderBytes;
  FLATSHARD_CHECK(
      words_.nbytes() == data_begin_ + num_tokens_ * type_->nbytes,
      format,
      "{}: expected {} bytes for the {} tokens that the header of llm.c names, "
      "got {}; fetch the file again",
      path().string(),
      data_begin_ + num_tokens_ * type_->nbytes,
      num_tokens_,
      words_.nbytes());
  return true;
}

bool TokenFile::open_numpy() {
  const auto header = read_numpy_header(words_);
  if (!header) {
    return false;
  }
  type_ = header->type;
  what_ = fmt::format("NumPy {}", type_->name);
  num_tokens_ = header->num_elements;
  data_begin_ = header->nbytes;
  FLATSHARD_CHECK(
      words_.nbytes() == data_begin_ + num_tokens_ * type_->nbytes,
      format,
      "{}: expected {} bytes for the {} elements that the header of NumPy "
      "names, got {}; save one array in a file",
      path().string(),
      data_begin_ + num_tokens_ * type_->nbytes,
      num_tokens_,
      words_.nbytes());
  return true;
}

bool TokenFile::open_megatron() {
  std::filesystem::path index = path();
  index.replace_extension(".idx");
  std::error_code error;
  if (index == path()) {
    std::filesystem::path data = path();
    data.replace_extension(".bin");
    FLATSHARD_THROW(
        config,
        "--input {}: expected the file of tokens, got its index; name {}",
        path().string(),
        data.string());
  }
  if (!std::filesystem::exists(index, error)) {
    return false;
  }
  read_index(index);
  return true;
}

// Source: megatron/core/datasets/indexed_dataset.py.
void TokenFile::read_index(const std::filesystem::path& path) {
  struct Type {
    std::uint8_t code;
    std::string_view name;
  };
  constexpr std::array kTypes{
      Type{1, "uint8"},
      Type{2, "int8"},
      Type{3, "int16"},
      Type{4, "int32"},
      Type{5, "int64"},
      Type{8, "uint16"}};
  constexpr std::int64_t kHeaderBytes = 34;
  const FileReader file(path);
  std::array<char, kIndexMagic.size()> magic{};
  if (file.nbytes() >= kHeaderBytes) {
    file.read_at(0, std::as_writable_bytes(std::span(magic)));
  }
  FLATSHARD_CHECK(
      std::string_view(magic.data(), magic.size()) == kIndexMagic &&
          read_value<std::uint64_t>(file, 9) == 1,
      format,
      "{}: expected the index of Megatron's tokens (MMIDIDX, version 1)",
      path.string());
  const auto code = read_value<std::uint8_t>(file, 17);
  const Type* type = nullptr;
  for (const Type& known : kTypes) {
    if (known.code == code) {
      type = &known;
    }
  }
  FLATSHARD_CHECK(
      type != nullptr,
      format,
      "{}: expected tokens of integers, got the dtype code {}",
      path.string(),
      code);
  type_ = find_word_type(type->name);
  what_ = fmt::format("Megatron {}", type->name);
  const auto sequences = read_value<std::int64_t>(file, 18);
  const auto ends = read_value<std::int64_t>(file, 26);
  constexpr std::int64_t kBytesPerSequence = 4 + 8;
  FLATSHARD_CHECK(
      sequences >= 0 && ends >= 1 &&
          sequences <= file.nbytes() / kBytesPerSequence &&
          ends <= file.nbytes() / 8 &&
          file.nbytes() >=
              kHeaderBytes + sequences * kBytesPerSequence + ends * 8,
      format,
      "{}: the index is cut off: it names {} sequences and {} documents",
      path.string(),
      sequences,
      ends - 1);
  std::vector<std::int32_t> sizes(static_cast<std::size_t>(sequences));
  std::vector<std::int64_t> pointers(sizes.size());
  std::vector<std::int64_t> documents(static_cast<std::size_t>(ends));
  file.read_at(kHeaderBytes, std::as_writable_bytes(std::span(sizes)));
  file.read_at(
      kHeaderBytes + 4 * sequences,
      std::as_writable_bytes(std::span(pointers)));
  file.read_at(
      kHeaderBytes + kBytesPerSequence * sequences,
      std::as_writable_bytes(std::span(documents)));
  std::vector<std::int64_t> begins{0};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    FLATSHARD_CHECK(
        sizes[i] >= 0 && pointers[i] == begins.back() * type_->nbytes,
        format,
        "{}: expected sequence {} at byte {} of the tokens, got {}",
        path.string(),
        i,
        begins.back() * type_->nbytes,
        pointers[i]);
    begins.push_back(begins.back() + sizes[i]);
  }
  num_tokens_ = begins.back();
  FLATSHARD_CHECK(
      words_.nbytes() == num_tokens_ * type_->nbytes,
      format,
      "{}: expected {} bytes for the {} tokens that {} names, got {}",
      this->path().string(),
      num_tokens_ * type_->nbytes,
      num_tokens_,
      path.string(),
      words_.nbytes());
  for (const std::int64_t document : documents) {
    FLATSHARD_CHECK(
        document >= 0 && document <= sequences &&
            (documents_.empty() ||
             documents_.back() <= begins[static_cast<std::size_t>(document)]),
        format,
        "{}: expected documents of its {} sequences, got {}",
        path.string(),
        sequences,
        document);
    documents_.push_back(begins[static_cast<std::size_t>(document)]);
  }
  FLATSHARD_CHECK(
      documents_.front() == 0 && documents_.back() == num_tokens_,
      format,
      "{}: expected documents that have all {} tokens, got those from {} to {}",
      path.string(),
      num_tokens_,
      documents_.front(),
      documents_.back());
}

void TokenFile::check_raw(std::string_view dtype) const {
  constexpr std::int64_t kLooked = std::int64_t{1} << 16;
  const std::int64_t looked = std::min(words_.nbytes() / 2, kLooked);
  std::vector<std::uint16_t> words(static_cast<std::size_t>(looked));
  words_.read_at(0, std::as_writable_bytes(std::span(words)));
  const std::string_view head(
      reinterpret_cast<const char*>(words.data()),
      words.size() * sizeof(words[0]));
  std::string_view what = container_of(path(), head);
  for (const Foreign& foreign : kForeign) {
    what = head.starts_with(foreign.magic) ? foreign.what : what;
  }
  if (what.empty() && dtype.empty() && head.size() >= 8 && is_text(head)) {
    what = "text, which flatshard data prepare reads";
  }
  FLATSHARD_CHECK(
      what.empty(),
      format,
      "{}: expected tokens, got {}",
      path().string(),
      what);
  const std::int64_t nbytes = likely_word_nbytes(words);
  FLATSHARD_CHECK(
      nbytes < 8 || dtype == "int64" || dtype == "uint64",
      format,
      "{}: every second 32-bit word is 0, as in tokens of 64 bits; name what "
      "they are with --dtype int64",
      path().string());
  FLATSHARD_CHECK(
      nbytes < 4 || !dtype.empty(),
      format,
      "{}: every second uint16 word is 0 to 3, as in tokens of 32 bits; name "
      "what they are with --dtype uint32 (or uint16)",
      path().string());
}

void TokenFile::open_raw(const WordType* type) {
  type_ = type;
  what_ = fmt::format("raw {}", type_->name);
  num_tokens_ = words_.nbytes() / type_->nbytes;
  FLATSHARD_CHECK(
      words_.nbytes() % type_->nbytes == 0,
      format,
      "{}: expected a multiple of {} bytes for {} tokens, got {} bytes",
      path().string(),
      type_->nbytes,
      what_,
      words_.nbytes());
}

void TokenFile::read(
    std::int64_t begin,
    std::span<std::uint32_t> out,
    std::int64_t vocab_size) const {
  std::vector<std::byte> bytes(
      out.size() * static_cast<std::size_t>(type_->nbytes));
  words_.read_at(data_begin_ + begin * type_->nbytes, bytes);
  std::vector<std::int64_t> tokens(out.size());
  type_->widen(bytes, tokens);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    FLATSHARD_CHECK(
        tokens[i] >= 0 && tokens[i] < vocab_size,
        format,
        "{}: expected {} tokens below the vocabulary's {}, got {} at place {}; "
        "name the tokenizer that they are of, and the type of raw words with "
        "--dtype",
        path().string(),
        what_,
        vocab_size,
        tokens[i],
        begin + static_cast<std::int64_t>(i));
    out[i] = static_cast<std::uint32_t>(tokens[i]);
  }
}

}  // namespace flatshard::data
