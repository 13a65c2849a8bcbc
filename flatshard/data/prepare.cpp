#include "flatshard/data/prepare.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>

#include "flatshard/core/error.h"
#include "flatshard/core/mapped_file.h"
#include "flatshard/core/philox.h"
#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/input_files.h"
#include "flatshard/data/python_tokenizer.h"

namespace flatshard::data {
namespace {

constexpr std::size_t kChunkTokens = std::size_t{1} << 18;

/// Each byte of a file is one token.
class ByteDocuments : public DocumentStream {
 public:
  explicit ByteDocuments(const std::vector<InputFile>& files)
      : files_(files), bytes_(kChunkTokens) {}
  ~ByteDocuments() override { close(); }

  std::int64_t vocab_size() const override { return kByteVocabSize; }
  std::int64_t end_of_document() const override { return kByteEndOfDocument; }

  std::int64_t next_document() override {
    close();
    const InputFile& file = files_[next_++];
    fd_ = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    check_read(fd_ >= 0);
    return file.nbytes;
  }

  void read(std::span<std::uint32_t> out) override {
    while (!out.empty()) {
      const ssize_t n =
          ::read(fd_, bytes_.data(), std::min(out.size(), bytes_.size()));
      if (n < 0 && errno == EINTR) {
        continue;
      }
      check_read(n >= 0);
      FLATSHARD_CHECK(
          n > 0,
          io,
          "{} became shorter while it was read; expected {} bytes",
          files_[next_ - 1].path.string(),
          files_[next_ - 1].nbytes);
      std::copy_n(bytes_.begin(), n, out.begin());
      out = out.subspan(static_cast<std::size_t>(n));
    }
  }

 private:
  void check_read(bool ok) const {
    FLATSHARD_CHECK(
        ok,
        io,
        "cannot read {}: {}",
        files_[next_ - 1].path.string(),
        std::strerror(errno));
  }
  void close() {
    if (fd_ >= 0) {
      ::close(fd_);
      fd_ = -1;
    }
  }

  const std::vector<InputFile>& files_;
  std::vector<unsigned char> bytes_;
  std::size_t next_ = 0;
  int fd_ = -1;
};

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

  void add(std::int64_t nbytes) {
    done_ += nbytes;
    const auto now = std::chrono::steady_clock::now();
    if (!enabled_ || now - last_ < std::chrono::milliseconds(100)) {
      return;
    }
    last_ = now;
    fmt::print(
        stderr,
        "\rprepared {:3.0f}% of {:.1f} MB\033[K",
        100.0 * static_cast<double>(done_) / static_cast<double>(total_),
        static_cast<double>(total_) / 1e6);
  }

 private:
  bool enabled_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  std::chrono::steady_clock::time_point last_;
};

/// Which documents belong to validation.
std::vector<bool> choose_validation(
    const std::vector<InputFile>& files,
    double fraction) {
  std::vector<double> draw;
  for (const InputFile& file : files) {
    draw.push_back(
        static_cast<double>(mix_keys(stable_hash(file.name), 0) >> 11) *
        0x1p-53);
  }
  std::vector<bool> chosen;
  for (const double value : draw) {
    chosen.push_back(value < fraction);
  }
  const auto count = std::count(chosen.begin(), chosen.end(), true);
  if (files.size() >= 2 && fraction > 0) {
    if (count == 0) {
      chosen[static_cast<std::size_t>(
          std::min_element(draw.begin(), draw.end()) - draw.begin())] = true;
    } else if (count == static_cast<std::ptrdiff_t>(files.size())) {
      chosen[static_cast<std::size_t>(
          std::max_element(draw.begin(), draw.end()) - draw.begin())] = false;
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

void end_document(DocumentStream& stream, SplitWriter& writer) {
  const std::array<std::uint32_t, 1> end{
      static_cast<std::uint32_t>(stream.end_of_document())};
  writer.append(end);
  writer.end_document();
}

void write_documents(
    DocumentStream& stream,
    const std::vector<InputFile>& files,
    double validation_fraction,
    SplitWriter& train,
    SplitWriter& validation,
    Progress& progress) {
  std::vector<std::uint32_t> buffer(kChunkTokens);
  const auto to_validation = choose_validation(files, validation_fraction);
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::int64_t count = stream.next_document();
    if (files.size() == 1 && validation_fraction > 0) {
      const auto tail = static_cast<std::int64_t>(
          static_cast<double>(count) * validation_fraction);
      copy_tokens(stream, count - tail, train, buffer);
      end_document(stream, train);
      copy_tokens(stream, tail, validation, buffer);
      end_document(stream, validation);
    } else {
      SplitWriter& writer = to_validation[i] ? validation : train;
      copy_tokens(stream, count, writer, buffer);
      end_document(stream, writer);
    }
    progress.add(files[i].nbytes);
  }
}

std::unique_ptr<DocumentStream> open_stream(
    const PrepareOptions& options,
    const std::vector<InputFile>& files) {
  if (options.tokenizer == "bytes") {
    FLATSHARD_CHECK(
        options.end_of_document.empty(),
        config,
        "--end-of-document belongs to a tokenizer.json; byte tokens end a "
        "document with token {}",
        kByteEndOfDocument);
    return std::make_unique<ByteDocuments>(files);
  }
  return std::make_unique<PythonDocuments>(
      PythonTokenizerOptions{
          .python = options.python,
          .tokenizer = options.tokenizer,
          .end_of_document = options.end_of_document},
      files);
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
  std::vector<InputFile> files = find_input_files(options.inputs);
  const std::size_t num_found = files.size();
  std::erase_if(files, [](const InputFile& file) { return file.nbytes == 0; });
  FLATSHARD_CHECK(
      !files.empty(),
      io,
      "--input: all {} files are empty, so the corpus would be empty",
      num_found);
  StagedFolder staged(options.output, options.force);
  const auto stream = open_stream(options, files);

  CorpusMeta meta;
  meta.vocab_size = stream->vocab_size();
  meta.end_of_document = stream->end_of_document();
  meta.token_type =
      meta.vocab_size <= 65536 ? TokenType::uint16 : TokenType::uint32;
  meta.input_hash = hash_inputs(files);
  meta.tokenizer = "bytes";
  if (options.tokenizer != "bytes") {
    meta.tokenizer = "tokenizer.json";
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
    write_documents(
        *stream,
        files,
        options.validation_fraction,
        train,
        validation,
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
