#include "flatshard/data/token_file.h"

#include <array>
#include <cstring>

#include "flatshard/core/error.h"

namespace flatshard::data {
namespace {

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

template <class T>
void widen(std::span<const std::byte> words, std::span<std::int64_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T word;
    std::memcpy(&word, words.data() + i * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(word);
  }
}

}  // namespace

TokenFile::TokenFile(const std::filesystem::path& path, std::string_view dtype)
    : words_(path) {
  FLATSHARD_CHECK(
      dtype.empty() || dtype == "uint16" || dtype == "uint32",
      config,
      "--dtype: expected uint16 or uint32, got '{}'",
      dtype);
  if (!open_llm_c() && !open_megatron()) {
    open_raw(dtype);
  }
  FLATSHARD_CHECK(
      num_tokens_ > 0,
      format,
      "{}: expected tokens, got none",
      path.string());
}

void TokenFile::set_word(Word word) {
  word_ = word;
  switch (word) {
    case Word::uint8:
      word_nbytes_ = 1;
      break;
    case Word::uint16:
    case Word::int16:
      word_nbytes_ = 2;
      break;
    case Word::int32:
    case Word::uint32:
      word_nbytes_ = 4;
      break;
    case Word::int64:
      word_nbytes_ = 8;
      break;
  }
}

bool TokenFile::open_llm_c() {
  if (words_.nbytes() < kLlmcHeaderBytes) {
    return false;
  }
  const auto magic = read_value<std::int32_t>(words_, 0);
  if (magic != kLlmcUint16 && magic != kLlmcUint32) {
    return false;
  }
  set_word(magic == kLlmcUint16 ? Word::uint16 : Word::uint32);
  what_ = magic == kLlmcUint16 ? "llm.c uint16" : "llm.c uint32";
  num_tokens_ = read_value<std::int32_t>(words_, 8);
  data_begin_ = kLlmcHeaderBytes;
  FLATSHARD_CHECK(
      words_.nbytes() == data_begin_ + num_tokens_ * word_nbytes_,
      format,
      "{}: expected {} bytes for the {} tokens that the header of llm.c names, "
      "got {}; fetch the file again",
      path().string(),
      data_begin_ + num_tokens_ * word_nbytes_,
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
    Word word;
    const char* name;
  };
  constexpr std::array kTypes{
      Type{1, Word::uint8, "Megatron uint8"},
      Type{3, Word::int16, "Megatron int16"},
      Type{4, Word::int32, "Megatron int32"},
      Type{5, Word::int64, "Megatron int64"},
      Type{8, Word::uint16, "Megatron uint16"}};
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
  set_word(type->word);
  what_ = type->name;
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
        sizes[i] >= 0 && pointers[i] == begins.back() * word_nbytes_,
        format,
        "{}: expected sequence {} at byte {} of the tokens, got {}",
        path.string(),
        i,
        begins.back() * word_nbytes_,
        pointers[i]);
    begins.push_back(begins.back() + sizes[i]);
  }
  num_tokens_ = begins.back();
  FLATSHARD_CHECK(
      words_.nbytes() == num_tokens_ * word_nbytes_,
      format,
      "{}: expected {} bytes for the {} tokens that {} names, got {}",
      this->path().string(),
      num_tokens_ * word_nbytes_,
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

void TokenFile::open_raw(std::string_view dtype) {
  constexpr std::int64_t kLooked = std::int64_t{1} << 16;
  const std::int64_t looked = std::min(words_.nbytes() / 2, kLooked);
  std::vector<std::uint16_t> words(static_cast<std::size_t>(looked));
  words_.read_at(0, std::as_writable_bytes(std::span(words)));
  // The upper halves of small 32-bit tokens.
  bool wide = looked >= 8;
  for (std::size_t i = 1; i < words.size(); i += 2) {
    wide = wide && words[i] <= 3;
  }
  bool same = true;
  for (const std::uint16_t word : words) {
    same = same && word <= 3;
  }
  FLATSHARD_CHECK(
      !wide || same || !dtype.empty(),
      format,
      "{}: every second uint16 word is 0 to 3, as in tokens of 32 bits; name "
      "what they are with --dtype uint32 (or uint16)",
      path().string());
  set_word(dtype == "uint32" ? Word::uint32 : Word::uint16);
  what_ = dtype == "uint32" ? "raw uint32" : "raw uint16";
  num_tokens_ = words_.nbytes() / word_nbytes_;
  FLATSHARD_CHECK(
      words_.nbytes() % word_nbytes_ == 0,
      format,
      "{}: expected a multiple of {} bytes for {} tokens, got {} bytes",
      path().string(),
      word_nbytes_,
      what_,
      words_.nbytes());
}

void TokenFile::read(
    std::int64_t begin,
    std::span<std::uint32_t> out,
    std::int64_t vocab_size) const {
  std::vector<std::byte> bytes(
      out.size() * static_cast<std::size_t>(word_nbytes_));
  words_.read_at(data_begin_ + begin * word_nbytes_, bytes);
  std::vector<std::int64_t> tokens(out.size());
  switch (word_) {
    case Word::uint8:
      widen<std::uint8_t>(bytes, tokens);
      break;
    case Word::uint16:
      widen<std::uint16_t>(bytes, tokens);
      break;
    case Word::int16:
      widen<std::int16_t>(bytes, tokens);
      break;
    case Word::int32:
      widen<std::int32_t>(bytes, tokens);
      break;
    case Word::uint32:
      widen<std::uint32_t>(bytes, tokens);
      break;
    case Word::int64:
      widen<std::int64_t>(bytes, tokens);
      break;
  }
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
