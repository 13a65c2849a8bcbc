#include "flatshard/data/corpus_writer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/philox.h"
#include "flatshard/core/process.h"
#include "flatshard/data/hf_tokenizer.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace flatshard::data {
namespace {

namespace fs = std::filesystem;

/// "<folder>/.<name>.<suffix>-<host>-": a process number follows.
std::string sibling_prefix(const fs::path& target, std::string_view suffix) {
  return fmt::format(
      ".{}.{}-{}-",
      target.filename().string(),
      suffix,
      host_name());
}

fs::path sibling(const fs::path& target, std::string_view suffix) {
  return target.parent_path() /
         fmt::format("{}{}", sibling_prefix(target, suffix), ::getpid());
}

/// Returns the siblings that processes of this host left when they were killed.
std::vector<fs::path> left_behind(
    const fs::path& target,
    std::string_view suffix) {
  return left_by_ended_processes(
      target.parent_path(),
      sibling_prefix(target, suffix));
}

void rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot rename {} to {}: {}",
      from.string(),
      to.string(),
      error.message());
}

/// Restores a dataset that a killed process had moved away and not replaced,
/// and removes all other leftovers of such processes.
void clean_up(const fs::path& target) {
  std::vector<fs::path> rest = left_behind(target, "tmp");
  for (const fs::path& old : left_behind(target, "old")) {
    if (fs::exists(target)) {
      rest.push_back(old);
    } else {
      rename_folder(old, target);
      log_warning(
          "restored {}: an interrupted run had moved it away",
          target.string());
    }
  }
  for (const fs::path& path : rest) {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) {
      log_warning("cannot remove {}: {}", path.string(), error.message());
    } else {
      log_info("removed {}, a leftover of an interrupted run", path.string());
    }
  }
}

}  // namespace

/// SplitMeta::content_hash and mask_hash.
class ContentHash {
 public:
  ContentHash() { XXH3_64bits_reset(&state_); }
  template <class T>
  void update(std::span<const T> items) {
    XXH3_64bits_update(&state_, items.data(), items.size_bytes());
  }
  std::string text() const {
    return fmt::format("{:016x}", XXH3_64bits_digest(&state_));
  }

 private:
  XXH3_state_t state_;
};

SplitWriter::SplitWriter(
    fs::path folder,
    std::string name,
    TokenType type,
    std::int64_t shard_tokens,
    bool masked)
    : folder_(std::move(folder)),
      type_(type),
      shard_tokens_(shard_tokens),
      document_begin_{0},
      hash_(std::make_unique<ContentHash>()) {
  FLATSHARD_CHECK(
      shard_tokens > 0,
      config,
      "shard_tokens: expected at least 1, got {}",
      shard_tokens);
  meta_.name = std::move(name);
  if (masked) {
    meta_.trained_tokens = 0;
    mask_hash_ = std::make_unique<ContentHash>();
  }
}

SplitWriter::~SplitWriter() = default;

void SplitWriter::append(
    std::span<const std::uint32_t> tokens,
    std::span<const std::uint8_t> mask) {
  FLATSHARD_CHECK(
      mask.size() == (mask_hash_ ? tokens.size() : 0),
      usage,
      "expected {} bytes of a mask, got {}",
      mask_hash_ ? tokens.size() : 0,
      mask.size());
  hash_->update(tokens);
  while (!tokens.empty()) {
    if (!shard_ || meta_.shard_tokens.back() == shard_tokens_) {
      next_shard();
    }
    const auto room =
        static_cast<std::size_t>(shard_tokens_ - meta_.shard_tokens.back());
    const auto part = tokens.first(std::min(tokens.size(), room));
    if (type_ == TokenType::uint32) {
      shard_->write(part.data(), part.size_bytes());
    } else {
      narrow_.resize(part.size());
      for (std::size_t i = 0; i < part.size(); ++i) {
        FLATSHARD_CHECK(
            part[i] <= std::numeric_limits<std::uint16_t>::max(),
            internal,
            "token {} does not fit uint16",
            part[i]);
        narrow_[i] = static_cast<std::uint16_t>(part[i]);
      }
      shard_->write(narrow_.data(), narrow_.size() * sizeof(std::uint16_t));
    }
    if (mask_hash_) {
      write_mask(mask.first(part.size()));
      mask = mask.subspan(part.size());
    }
    meta_.shard_tokens.back() += static_cast<std::int64_t>(part.size());
    meta_.num_tokens += static_cast<std::int64_t>(part.size());
    tokens = tokens.subspan(part.size());
  }
}

void SplitWriter::write_mask(std::span<const std::uint8_t> mask) {
  mask_hash_->update(mask);
  mask_->write(mask.data(), mask.size());
  *meta_.trained_tokens += std::ranges::count(mask, std::uint8_t{1});
}

void SplitWriter::end_document() {
  document_begin_.push_back(static_cast<std::uint64_t>(meta_.num_tokens));
  ++meta_.num_documents;
}

SplitMeta SplitWriter::finish() {
  for (const auto& file : {&shard_, &mask_}) {
    if (*file) {
      (*file)->close();
    }
  }
  FileWriter documents(folder_ / meta_.document_file());
  documents.write(
      document_begin_.data(),
      document_begin_.size() * sizeof(std::uint64_t));
  documents.close();
  meta_.content_hash = hash_->text();
  if (mask_hash_) {
    meta_.mask_hash = mask_hash_->text();
  }
  return meta_;
}

void SplitWriter::next_shard() {
  if (shard_) {
    shard_->close();
  }
  const std::size_t number = meta_.shard_tokens.size();
  shard_ = std::make_unique<FileWriter>(folder_ / meta_.shard_file(number));
  if (mask_hash_) {
    if (mask_) {
      mask_->close();
    }
    mask_ = std::make_unique<FileWriter>(folder_ / meta_.mask_file(number));
  }
  meta_.shard_tokens.push_back(0);
}

fs::path StagedFolder::check(fs::path target, bool force) {
  FLATSHARD_CHECK(
      !target.empty(),
      config,
      "expected an output folder, got an empty path");
  target = fs::absolute(target).lexically_normal();
  if (!target.has_filename()) {
    target = target.parent_path();
  }
  clean_up(target);
  const bool exists =
      fs::exists(target) && !(fs::is_directory(target) && fs::is_empty(target));
  FLATSHARD_CHECK(
      !exists || force,
      usage,
      "{} exists; give --force to replace it, or another --output",
      target.string());
  FLATSHARD_CHECK(
      !exists || fs::is_regular_file(target / "meta.json"),
      usage,
      "{} exists and is not a dataset (it has no meta.json), so --force does "
      "not delete it; give another --output",
      target.string());
  return target;
}

StagedFolder::StagedFolder(fs::path target, bool force)
    : target_(check(std::move(target), force)) {
  path_ = sibling(target_, "tmp");
  std::error_code error;
  fs::remove_all(path_, error);
  make_folder(path_);
}

StagedFolder::~StagedFolder() {
  if (path_.empty()) {
    return;
  }
  std::error_code error;
  fs::remove_all(path_, error);
  if (error) {
    log_warning("cannot remove {}: {}", path_.string(), error.message());
  }
}

void StagedFolder::commit() {
  sync_folder(path_);
  fs::path old;
  if (fs::exists(target_)) {
    old = sibling(target_, "old");
    rename_folder(target_, old);
  }
  rename_folder(path_, target_);
  path_.clear();
  sync_folder(target_.parent_path());
  std::error_code error;
  if (!old.empty() && fs::remove_all(old, error) == 0) {
    log_warning("cannot remove {}: {}", old.string(), error.message());
  }
}

CorpusWriter::CorpusWriter(const CorpusOptions& options, CorpusMeta meta)
    : options_(options),
      meta_([&] {
        meta.token_type =
            meta.vocab_size <= 65536 ? TokenType::uint16 : TokenType::uint32;
        return std::move(meta);
      }()),
      staged_(options.output, options.force),
      train_(
          staged_.path(),
          "train",
          meta_.token_type,
          options.shard_tokens,
          options.masked),
      validation_(
          staged_.path(),
          "validation",
          meta_.token_type,
          options.shard_tokens,
          options.masked) {
  if (!options.tokenizer.empty()) {
    copy_tokenizer(options.tokenizer, staged_.path());
  }
}

void CorpusWriter::append_one(
    bool to_validation,
    std::int64_t token,
    bool trained) {
  const std::array<std::uint32_t, 1> one{static_cast<std::uint32_t>(token)};
  const std::array<std::uint8_t, 1> mask{
      trained ? std::uint8_t{1} : std::uint8_t{0}};
  append(to_validation, one, std::span(mask).first(options_.masked ? 1 : 0));
}

void CorpusWriter::begin_document(bool to_validation) {
  if (meta_.begin_of_document) {
    append_one(to_validation, *meta_.begin_of_document, /*trained=*/false);
  }
}

void CorpusWriter::append(
    bool to_validation,
    std::span<const std::uint32_t> tokens,
    std::span<const std::uint8_t> mask) {
  (to_validation ? validation_ : train_).append(tokens, mask);
}

void CorpusWriter::end_document(bool to_validation, bool trains_end) {
  append_one(to_validation, meta_.end_of_document, trains_end);
  (to_validation ? validation_ : train_).end_document();
}

const CorpusMeta& CorpusWriter::commit() {
  meta_.splits.push_back(train_.finish());
  if (options_.has_validation) {
    meta_.splits.push_back(validation_.finish());
  }
  FileWriter file(staged_.path() / "meta.json");
  file.write(meta_.to_json());
  file.close();
  staged_.commit();
  return meta_;
}

double document_draw(std::string_view name) {
  return static_cast<double>(mix_keys(stable_hash(name), 0) >> 11) * 0x1p-53;
}

}  // namespace flatshard::data
