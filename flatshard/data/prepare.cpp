#include "flatshard/data/prepare.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/byte_documents.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/hf_tokenizer.h"
#include "flatshard/data/input_files.h"
#include "flatshard/data/json_lines.h"
#include "flatshard/data/python_tokenizer.h"

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

/// A number in [0, 1) of the document's name alone.
double draw_of(const InputFile& file, std::int64_t row) {
  const std::uint64_t hash =
      file.kind() == InputKind::text
          ? stable_hash(file.name)
          : stable_hash(fmt::format("{}#{}", file.name, row));
  return static_cast<double>(mix_keys(hash, 0) >> 11) * 0x1p-53;
}

/// Which documents belong to validation.
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

std::string hash_inputs(const std::vector<InputFile>& files) {
  std::uint64_t hash = files.size();
  for (const InputFile& file : files) {
    hash = mix_keys(hash, stable_hash(file.name));
    hash = mix_keys(hash, static_cast<std::uint64_t>(file.nbytes));
  }
  return fmt::format("{:016x}", hash);
}

void copy_tokens(
    DocumentStream& stream,
    std::int64_t count,
    SplitWriter& writer,
    std::vector<std::uint32_t>& buffer) {
  while (count > 0) {
    const auto part = std::min(static_cast<std::size_t>(count), buffer.size());
    const auto chunk = std::span(buffer).first(part);
    stream.read(chunk);
    writer.append(chunk);
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
    if (meta_.begin_of_document) {
      append(*meta_.begin_of_document);
    }
    copy_tokens(stream, count, writer_, buffer_);
    append(meta_.end_of_document);
    writer_.end_document();
  }

 private:
  void append(std::int64_t token) {
    const std::array<std::uint32_t, 1> one{static_cast<std::uint32_t>(token)};
    writer_.append(one);
  }

  SplitWriter& writer_;
  const CorpusMeta& meta_;
  std::vector<std::uint32_t>& buffer_;
};

void write_documents(
    DocumentStream& stream,
    const std::vector<InputFile>& files,
    double validation_fraction,
    DocumentWriter train,
    DocumentWriter validation,
    Progress& progress) {
  const auto to_validation = choose_validation(files, validation_fraction);
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

/// "a, b, c and 4 more"
std::string some_names(const std::vector<InputFile>& files) {
  constexpr std::size_t kMost = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(files.size(), kMost); ++i) {
    text += (i > 0 ? ", " : "") + files[i].name;
  }
  return files.size() > kMost
             ? fmt::format("{} and {} more", text, files.size() - kMost)
             : text;
}

/// Counts the documents of .jsonl and .parquet files, which finds what is wrong
/// with them before hours of work.
void count_rows(
    std::vector<InputFile>& files,
    const std::string& text_field,
    const PythonTokenizerOptions& python) {
  std::optional<PythonChild> parquet;
  for (InputFile& file : files) {
    if (file.kind() == InputKind::jsonl) {
      JsonLines lines(file.path, text_field);
      std::string text;
      file.num_documents = 0;
      while (lines.next(text)) {
        ++file.num_documents;
      }
    } else if (file.kind() == InputKind::parquet) {
      if (!parquet) {
        parquet.emplace(python, "count", file_list(files, InputKind::parquet));
      }
      file.num_documents = parquet->read_count();
    }
  }
}

/// The files that hold documents, and how many each.
std::vector<InputFile> find_documents(
    const PrepareOptions& options,
    const PythonTokenizerOptions& python) {
  std::vector<InputFile> files = find_input_files(options.inputs);
  const std::size_t num_found = files.size();
  const auto binary = take_binary_files(files);
  if (!binary.empty()) {
    log_warning(
        "skipped {} binary files of {}: {}; a file that --input names itself "
        "is taken as it is",
        binary.size(),
        num_found,
        some_names(binary));
  }
  FLATSHARD_CHECK(
      options.text_field.empty() || std::ranges::any_of(
                                        files,
                                        [](const InputFile& file) {
                                          return file.kind() != InputKind::text;
                                        }),
      config,
      "--text-field belongs to .jsonl and .parquet files; --input has none");
  std::erase_if(files, [](const InputFile& file) { return file.nbytes == 0; });
  count_rows(files, python.text_field, python);
  std::erase_if(files, [](const InputFile& file) {
    return file.num_documents == 0;
  });
  FLATSHARD_CHECK(
      !files.empty(),
      io,
      "--input: all {} files are empty{}, so the corpus would be empty",
      num_found,
      binary.empty() ? "" : " or binary");
  return files;
}

std::unique_ptr<DocumentStream> open_stream(
    const PrepareOptions& options,
    const std::vector<InputFile>& files,
    const PythonTokenizerOptions& python) {
  if (options.tokenizer != "bytes") {
    return std::make_unique<PythonDocuments>(python, files);
  }
  for (const auto& [name, value] :
       {std::pair{"--end-of-document", options.end_of_document},
        std::pair{"--begin-of-document", options.begin_of_document}}) {
    FLATSHARD_CHECK(
        value.empty(),
        config,
        "{} belongs to a tokenizer.json; byte tokens end a document with token "
        "{} and begin it with none",
        name,
        kByteEndOfDocument);
  }
  return std::make_unique<ByteDocuments>(files, python.text_field, python);
}

void write_text_file(
    const std::filesystem::path& path,
    std::string_view content) {
  FileWriter writer(path);
  writer.write(content);
  writer.close();
}

}  // namespace

CorpusMeta prepare_corpus(const PrepareOptions& options) {
  FLATSHARD_CHECK(
      options.validation_fraction >= 0 && options.validation_fraction < 1,
      config,
      "--validation-fraction: expected a number in [0, 1), got {}",
      options.validation_fraction);
  const bool is_bytes = options.tokenizer == "bytes";
  PythonTokenizerOptions python{
      .python = options.python,
      .end_of_document = options.end_of_document,
      .begin_of_document = options.begin_of_document,
      .text_field = options.text_field.empty() ? "text" : options.text_field};
  if (!is_bytes) {
    python.tokenizer = find_tokenizer(options.tokenizer);
    if (python.end_of_document.empty()) {
      python.end_of_document = eos_token(options.tokenizer);
    }
  }
  const std::vector<InputFile> files = find_documents(options, python);
  StagedFolder staged(options.output, options.force);
  const auto stream = open_stream(options, files, python);

  CorpusMeta meta;
  meta.vocab_size = stream->vocab_size();
  meta.end_of_document = stream->end_of_document();
  meta.token_type =
      meta.vocab_size <= 65536 ? TokenType::uint16 : TokenType::uint32;
  meta.input_hash = hash_inputs(files);
  meta.begin_of_document = stream->begin_of_document();
  meta.tokenizer = is_bytes ? "bytes" : kTokenizerFile;
  if (std::filesystem::is_directory(options.tokenizer)) {
    copy_tokenizer_files(options.tokenizer, staged.path());
  } else if (!is_bytes) {
    const MappedFile tokenizer(options.tokenizer);
    write_text_file(staged.path() / meta.tokenizer, tokenizer.text());
  }

  std::int64_t total_nbytes = 0;
  for (const InputFile& file : files) {
    total_nbytes += file.nbytes;
  }
  SplitWriter train(
      staged.path(),
      "train",
      meta.token_type,
      options.shard_tokens);
  SplitWriter validation(
      staged.path(),
      "validation",
      meta.token_type,
      options.shard_tokens);
  {
    Progress progress(options.progress, total_nbytes);
    std::vector<std::uint32_t> buffer(kChunkTokens);
    write_documents(
        *stream,
        files,
        options.validation_fraction,
        {train, meta, buffer},
        {validation, meta, buffer},
        progress);
  }
  meta.splits.push_back(train.finish());
  if (options.validation_fraction > 0) {
    meta.splits.push_back(validation.finish());
  }
  write_text_file(staged.path() / "meta.json", meta.to_json());
  staged.commit();
  return meta;
}

}  // namespace flatshard::data
