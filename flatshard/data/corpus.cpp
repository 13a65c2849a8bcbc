#include "flatshard/data/corpus.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/mapped_file.h"

namespace flatshard::data {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "flatshard-corpus";
constexpr int kVersion = 1;
// Older programs would train on every token.
constexpr int kVersionWithMasks = 2;
// Keeps byte counts of a damaged meta.json from overflowing.
constexpr std::int64_t kMaxCount = std::int64_t{1} << 56;

template <class T>
T take(const json& object, const char* key, const std::string& origin) {
  const auto found = object.find(key);
  FLATSHARD_CHECK(
      found != object.end(),
      format,
      "{}: key '{}' is missing",
      origin,
      key);
  try {
    return found->get<T>();
  } catch (const json::exception&) {
    FLATSHARD_THROW(
        format,
        "{}: key '{}' has the wrong type: {}",
        origin,
        key,
        found->dump());
  }
}

FileReader open_sized(
    const std::filesystem::path& path,
    std::int64_t expected_nbytes) {
  FileReader file(path);
  FLATSHARD_CHECK(
      file.nbytes() == expected_nbytes,
      format,
      "{}: expected {} bytes as in meta.json, got {}; the dataset is damaged, "
      "prepare it again",
      path.string(),
      expected_nbytes,
      file.nbytes());
  return file;
}

// Reads words `[begin, begin + out.size())` of a file into `out`.
template <class T>
void read_words(
    const FileReader& file,
    std::int64_t begin,
    std::span<std::int64_t> out) {
  // The words are read into the end of `out` and widened from the front. Word i
  // is never stored before the end of `out[i - 1]`, so no word is overwritten
  // before it is widened.
  const std::span<std::byte> words =
      std::as_writable_bytes(out).last(out.size() * sizeof(T));
  file.read_at(begin * static_cast<std::int64_t>(sizeof(T)), words);
  for (std::size_t i = 0; i < out.size(); ++i) {
    T word;
    std::memcpy(&word, words.data() + i * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int64_t>(word);
  }
}

}  // namespace

std::string_view to_string(TokenType type) {
  return type == TokenType::uint16 ? "uint16" : "uint32";
}

std::int64_t token_nbytes(TokenType type) {
  return type == TokenType::uint16 ? 2 : 4;
}

std::string SplitMeta::shard_file(std::size_t shard) const {
  return fmt::format("{}-{:05}.bin", name, shard);
}

std::string SplitMeta::mask_file(std::size_t shard) const {
  return fmt::format("{}-{:05}.mask.bin", name, shard);
}

std::string SplitMeta::document_file() const {
  return name + ".documents.bin";
}

const SplitMeta* CorpusMeta::find_split(std::string_view name) const {
  for (const SplitMeta& split : splits) {
    if (split.name == name) {
      return &split;
    }
  }
  return nullptr;
}

std::int64_t CorpusMeta::num_tokens() const {
  std::int64_t sum = 0;
  for (const SplitMeta& split : splits) {
    sum += split.num_tokens;
  }
  return sum;
}

std::int64_t CorpusMeta::num_documents() const {
  std::int64_t sum = 0;
  for (const SplitMeta& split : splits) {
    sum += split.num_documents;
  }
  return sum;
}

std::string CorpusMeta::to_json() const {
  nlohmann::ordered_json all;
  all["format"] = kFormat;
  const bool masked = std::ranges::any_of(splits, [](const SplitMeta& split) {
    return split.trained_tokens.has_value();
  });
  all["version"] = masked ? kVersionWithMasks : kVersion;
  all["dtype"] = to_string(token_type);
  all["vocab_size"] = vocab_size;
  all["end_of_document"] = end_of_document;
  if (begin_of_document) {
    all["begin_of_document"] = *begin_of_document;
  }
  all["tokenizer"] = tokenizer;
  all["num_tokens"] = num_tokens();
  all["num_documents"] = num_documents();
  all["input_hash"] = input_hash;
  all["splits"] = nlohmann::ordered_json::array();
  for (const SplitMeta& split : splits) {
    all["splits"].push_back(
        {{"name", split.name},
         {"num_tokens", split.num_tokens},
         {"num_documents", split.num_documents},
         {"shard_tokens", split.shard_tokens},
         {"content_hash", split.content_hash}});
    if (split.trained_tokens) {
      all["splits"].back()["trained_tokens"] = *split.trained_tokens;
      all["splits"].back()["mask_hash"] = split.mask_hash;
    }
  }
  return all.dump(2) + "\n";
}

CorpusMeta CorpusMeta::from_json(
    std::string_view text,
    const std::string& origin) {
  const json all = json::parse(text, nullptr, false);
  FLATSHARD_CHECK(
      all.is_object(),
      format,
      "{}: expected a JSON object",
      origin);
  FLATSHARD_CHECK(
      take<std::string>(all, "format", origin) == kFormat,
      format,
      "{}: expected \"format\": \"{}\"",
      origin,
      kFormat);
  const auto version = take<int>(all, "version", origin);
  FLATSHARD_CHECK(
      version == kVersion || version == kVersionWithMasks,
      format,
      "{}: this program reads dataset versions {} and {}, got version {}; "
      "prepare the dataset again with this program",
      origin,
      kVersion,
      kVersionWithMasks,
      version);
  CorpusMeta meta;
  const auto dtype = take<std::string>(all, "dtype", origin);
  FLATSHARD_CHECK(
      dtype == "uint16" || dtype == "uint32",
      format,
      "{}: dtype: expected uint16 or uint32, got '{}'",
      origin,
      dtype);
  meta.token_type = dtype == "uint16" ? TokenType::uint16 : TokenType::uint32;
  meta.vocab_size = take<std::int64_t>(all, "vocab_size", origin);
  meta.end_of_document = take<std::int64_t>(all, "end_of_document", origin);
  meta.tokenizer = take<std::string>(all, "tokenizer", origin);
  meta.input_hash = take<std::string>(all, "input_hash", origin);
  FLATSHARD_CHECK(
      meta.vocab_size > 0 && meta.end_of_document >= 0 &&
          meta.end_of_document < meta.vocab_size,
      format,
      "{}: expected 0 <= end_of_document < vocab_size, got {} and {}",
      origin,
      meta.end_of_document,
      meta.vocab_size);
  if (all.contains("begin_of_document")) {
    meta.begin_of_document =
        take<std::int64_t>(all, "begin_of_document", origin);
    FLATSHARD_CHECK(
        *meta.begin_of_document >= 0 &&
            *meta.begin_of_document < meta.vocab_size,
        format,
        "{}: expected 0 <= begin_of_document < vocab_size, got {} and {}",
        origin,
        *meta.begin_of_document,
        meta.vocab_size);
  }
  for (const json& item : take<json>(all, "splits", origin)) {
    SplitMeta split;
    split.name = take<std::string>(item, "name", origin);
    split.num_tokens = take<std::int64_t>(item, "num_tokens", origin);
    split.num_documents = take<std::int64_t>(item, "num_documents", origin);
    split.shard_tokens =
        take<std::vector<std::int64_t>>(item, "shard_tokens", origin);
    if (item.contains("content_hash")) {
      split.content_hash = take<std::string>(item, "content_hash", origin);
    }
    if (item.contains("trained_tokens")) {
      split.trained_tokens = take<std::int64_t>(item, "trained_tokens", origin);
      split.mask_hash = take<std::string>(item, "mask_hash", origin);
      FLATSHARD_CHECK(
          *split.trained_tokens >= 0 &&
              *split.trained_tokens <= split.num_tokens,
          format,
          "{}: split '{}': expected 0 <= trained_tokens <= num_tokens = {}, "
          "got {}",
          origin,
          split.name,
          split.num_tokens,
          *split.trained_tokens);
    }
    std::int64_t sum = 0;
    bool positive = true;
    for (const std::int64_t tokens : split.shard_tokens) {
      positive =
          positive && tokens > 0 && !__builtin_add_overflow(sum, tokens, &sum);
    }
    FLATSHARD_CHECK(
        positive && sum == split.num_tokens && sum < kMaxCount &&
            split.num_documents >= 0 && split.num_documents < kMaxCount,
        format,
        "{}: split '{}': shard_tokens must be positive and sum to num_tokens = "
        "{}, got a sum of {}",
        origin,
        split.name,
        split.num_tokens,
        sum);
    meta.splits.push_back(std::move(split));
  }
  return meta;
}

CorpusMeta CorpusMeta::load(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "meta.json";
  FLATSHARD_CHECK(
      std::filesystem::is_regular_file(path),
      io,
      "expected a dataset directory with a meta.json, got '{}'; make one "
      "with: flatshard data prepare --input 'texts/**/*.txt' --output {}",
      folder.string(),
      folder.string());
  const MappedFile file(path);
  return from_json(file.text(), path.string());
}

std::shared_ptr<const Corpus> Corpus::open(
    const std::filesystem::path& folder,
    std::string_view split) {
  std::shared_ptr<Corpus> corpus(new Corpus());
  corpus->meta_ = CorpusMeta::load(folder);
  const SplitMeta* found = corpus->meta_.find_split(split);
  FLATSHARD_CHECK(
      found != nullptr,
      config,
      "dataset {} has no split '{}'; prepare it with --validation-fraction "
      "above 0, or set another directory",
      folder.string(),
      split);
  corpus->split_ = *found;
  const std::int64_t nbytes = token_nbytes(corpus->meta_.token_type);
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < found->shard_tokens.size(); ++i) {
    corpus->shards_.push_back(open_sized(
        folder / found->shard_file(i),
        found->shard_tokens[i] * nbytes));
    if (found->trained_tokens) {
      corpus->masks_.push_back(
          open_sized(folder / found->mask_file(i), found->shard_tokens[i]));
    }
    corpus->shard_begin_.push_back(begin);
    begin += found->shard_tokens[i];
  }
  corpus->documents_ = open_sized(
      folder / found->document_file(),
      (found->num_documents + 1) * 8);
  return corpus;
}

std::int64_t Corpus::document_begin(std::int64_t i) const {
  std::int64_t first = 0;
  document_begins(i, {&first, 1});
  return first;
}

void Corpus::document_begins(std::int64_t first, std::span<std::int64_t> out)
    const {
  const auto count = static_cast<std::int64_t>(out.size());
  FLATSHARD_CHECK(
      first >= 0 && first <= num_documents() + 1 - count,
      usage,
      "expected documents in [0, {}], got [{}, {})",
      num_documents(),
      first,
      first + count);
  read_words<std::uint64_t>(documents_, first, out);
  const bool last_is_end = first + count <= num_documents() || out.empty() ||
                           out.back() == num_tokens();
  FLATSHARD_CHECK(
      std::ranges::is_sorted(out) && last_is_end &&
          (out.empty() || (out.front() >= 0 && out.back() <= num_tokens())),
      format,
      "{}: expected the first tokens of documents in ascending order up to "
      "the number of tokens, {}; the dataset is damaged, prepare it again",
      documents_.path().string(),
      num_tokens());
}

template <class F>
void Corpus::for_each_part(std::int64_t begin, std::int64_t count, F&& fn)
    const {
  FLATSHARD_CHECK(
      begin >= 0 && count <= num_tokens() && begin <= num_tokens() - count,
      usage,
      "expected tokens within [0, {}), got [{}, {})",
      num_tokens(),
      begin,
      begin + count);
  auto shard = static_cast<std::size_t>(
      std::upper_bound(shard_begin_.begin(), shard_begin_.end(), begin) -
      shard_begin_.begin());
  for (std::int64_t done = 0; done < count; ++shard) {
    const std::size_t at = shard - 1;
    const std::int64_t local = begin + done - shard_begin_[at];
    const std::int64_t part =
        std::min(count - done, split_.shard_tokens[at] - local);
    fn(at,
       local,
       static_cast<std::size_t>(done),
       static_cast<std::size_t>(part));
    done += part;
  }
}

void Corpus::read(std::int64_t begin, std::span<std::int64_t> out) const {
  for_each_part(
      begin,
      static_cast<std::int64_t>(out.size()),
      [&](std::size_t shard, std::int64_t at, std::size_t to, std::size_t n) {
        if (meta_.token_type == TokenType::uint16) {
          read_words<std::uint16_t>(shards_[shard], at, out.subspan(to, n));
        } else {
          read_words<std::uint32_t>(shards_[shard], at, out.subspan(to, n));
        }
      });
}

void Corpus::read_mask(std::int64_t begin, std::span<std::uint8_t> out) const {
  FLATSHARD_CHECK(has_mask(), usage, "split '{}' has no mask", split_.name);
  for_each_part(
      begin,
      static_cast<std::int64_t>(out.size()),
      [&](std::size_t shard, std::int64_t at, std::size_t to, std::size_t n) {
        const auto part = out.subspan(to, n);
        masks_[shard].read_at(at, std::as_writable_bytes(part));
        const auto bad =
            std::ranges::find_if(part, [](std::uint8_t m) { return m > 1; });
        FLATSHARD_CHECK(
            bad == part.end(),
            format,
            "{}: byte {}: expected 0 or 1, got {}; the dataset is damaged, "
            "prepare it again",
            masks_[shard].path().string(),
            at + (bad - part.begin()),
            static_cast<int>(*bad));
      });
}

}  // namespace flatshard::data
