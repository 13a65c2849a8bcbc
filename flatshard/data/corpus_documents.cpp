#include "flatshard/data/corpus_documents.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/hf_tokenizer.h"

namespace flatshard::data {
namespace {

constexpr std::size_t kChunkTokens = std::size_t{1} << 18;

/// "12% of 34.5 MB" on a terminal, at most ten times a second.
class Progress {
 public:
  Progress(bool wanted, std::int64_t total_nbytes)
      : enabled_(wanted && ::isatty(STDERR_FILENO) == 1),
        total_(total_nbytes) {}
  ~Progress() {
    if (enabled_) {
      fmt::print(stderr, "\r\033[K");
    }
  }

  void add(double nbytes) {
    done_ += nbytes;
    const auto now = std::chrono::steady_clock::now();
    if (!enabled_ || now - last_ < std::chrono::milliseconds(100)) {
      return;
    }
    last_ = now;
    fmt::print(
        stderr,
        "\rprepared {:3.0f}% of {:.1f} MB\033[K",
        100.0 * done_ / static_cast<double>(total_),
        static_cast<double>(total_) / 1e6);
  }

 private:
  bool enabled_;
  std::int64_t total_;
  double done_ = 0;
  std::chrono::steady_clock::time_point last_;
};

/// Returns a number in [0, 1) of the document's name alone.
double draw_of(const InputFile& file, std::int64_t row) {
  const std::uint64_t hash =
      file.kind == InputKind::json || file.kind == InputKind::parquet
          ? stable_hash(fmt::format("{}#{}", file.name, row))
          : stable_hash(file.name);
  return static_cast<double>(mix_keys(hash, 0) >> 11) * 0x1p-53;
}

void copy_tokens(
    DocumentStream& stream,
    std::int64_t count,
    SplitWriter& writer,
    std::vector<std::uint32_t>& buffer) {
  std::vector<std::uint8_t> mask;
  while (count > 0) {
    const auto part = std::min(static_cast<std::size_t>(count), buffer.size());
    const auto chunk = std::span(buffer).first(part);
    stream.read(chunk);
    if (stream.has_mask()) {
      mask.resize(part);
      stream.read_mask(mask);
    }
    writer.append(chunk, mask);
    count -= static_cast<std::int64_t>(part);
  }
}

/// A split's documents, with the tokens around each.
class DocumentWriter {
 public:
  DocumentWriter(
      SplitWriter& writer,
      const CorpusMeta& meta,
      std::vector<std::uint32_t>& buffer)
      : writer_(writer), meta_(meta), buffer_(buffer) {}

  void write(DocumentStream& stream, std::int64_t count) {
    const bool masked = stream.has_mask();
    if (meta_.begin_of_document) {
      append(*meta_.begin_of_document, masked, /*trained=*/false);
    }
    copy_tokens(stream, count, writer_, buffer_);
    append(meta_.end_of_document, masked, stream.trains_end());
    writer_.end_document();
  }

 private:
  void append(std::int64_t token, bool masked, bool trained) {
    const std::array<std::uint32_t, 1> one{static_cast<std::uint32_t>(token)};
    const std::array<std::uint8_t, 1> mask{
        trained ? std::uint8_t{1} : std::uint8_t{0}};
    writer_.append(one, std::span(mask).first(masked ? 1 : 0));
  }

  SplitWriter& writer_;
  const CorpusMeta& meta_;
  std::vector<std::uint32_t>& buffer_;
};

void write_documents(
    DocumentStream& stream,
    const std::vector<InputFile>& files,
    const std::vector<bool>& to_validation,
    double validation_fraction,
    DocumentWriter train,
    DocumentWriter validation,
    Progress& progress) {
  std::size_t i = 0;
  for (const InputFile& file : files) {
    for (std::int64_t row = 0; row < file.num_documents; ++row, ++i) {
      const std::int64_t count = stream.next_document();
      if (to_validation.size() == 1 && validation_fraction > 0) {
        const auto tail = static_cast<std::int64_t>(
            static_cast<double>(count) * validation_fraction);
        train.write(stream, count - tail);
        validation.write(stream, tail);
      } else {
        (to_validation[i] ? validation : train).write(stream, count);
      }
      progress.add(
          static_cast<double>(file.nbytes) /
          static_cast<double>(file.num_documents));
    }
  }
}

}  // namespace

std::vector<bool> choose_validation(
    const std::vector<InputFile>& files,
    double fraction) {
  std::vector<bool> chosen;
  // The documents with the lowest and the highest draw.
  std::array<std::size_t, 2> ends{};
  std::array<double, 2> draws{2, -1};
  for (const InputFile& file : files) {
    for (std::int64_t row = 0; row < file.num_documents; ++row) {
      const double draw = draw_of(file, row);
      if (draw < draws[0]) {
        draws[0] = draw;
        ends[0] = chosen.size();
      }
      if (draw > draws[1]) {
        draws[1] = draw;
        ends[1] = chosen.size();
      }
      chosen.push_back(draw < fraction);
    }
  }
  const auto count = std::count(chosen.begin(), chosen.end(), true);
  if (chosen.size() >= 2 && fraction > 0) {
    if (count == 0) {
      chosen[ends[0]] = true;
    } else if (count == static_cast<std::ptrdiff_t>(chosen.size())) {
      chosen[ends[1]] = false;
    }
  }
  return chosen;
}

void write_corpus(
    DocumentStream& stream,
    const std::vector<InputFile>& files,
    const std::vector<bool>& to_validation,
    const CorpusOptions& options,
    CorpusMeta& meta) {
  meta.token_type =
      meta.vocab_size <= 65536 ? TokenType::uint16 : TokenType::uint32;
  StagedFolder staged(options.output, options.force);
  if (!options.tokenizer.empty()) {
    copy_tokenizer(options.tokenizer, staged.path());
  }
  std::int64_t total_nbytes = 0;
  for (const InputFile& file : files) {
    total_nbytes += file.nbytes;
  }
  SplitWriter train(
      staged.path(),
      "train",
      meta.token_type,
      options.shard_tokens,
      stream.has_mask());
  SplitWriter validation(
      staged.path(),
      "validation",
      meta.token_type,
      options.shard_tokens,
      stream.has_mask());
  {
    Progress progress(options.progress, total_nbytes);
    std::vector<std::uint32_t> buffer(kChunkTokens);
    write_documents(
        stream,
        files,
        to_validation,
        options.validation_fraction,
        {train, meta, buffer},
        {validation, meta, buffer},
        progress);
  }
  meta.splits.push_back(train.finish());
  if (options.validation_fraction > 0) {
    meta.splits.push_back(validation.finish());
  }
  FileWriter meta_file(staged.path() / "meta.json");
  meta_file.write(meta.to_json());
  meta_file.close();
  check_unchanged(files);
  staged.commit();
}

}  // namespace flatshard::data
