#include "flatshard/data/python_tokenizer.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/data/prepare_script.h"

extern char** environ;

namespace flatshard::data {
namespace {

/// A temporary file, already deleted, with `content` and positioned at its
/// start. A pipe could fill up, or break when the child ends early.
std::FILE* file_with(std::string_view content) {
  std::FILE* file = std::tmpfile();
  FLATSHARD_CHECK(
      file != nullptr &&
          std::fwrite(content.data(), 1, content.size(), file) ==
              content.size() &&
          std::fflush(file) == 0,
      io,
      "cannot write a temporary file: {}",
      std::strerror(errno));
  std::rewind(file);
  return file;
}

}  // namespace

std::string find_python(const std::string& wanted) {
  if (!wanted.empty()) {
    return wanted;
  }
  const char* from_environment = std::getenv("FLATSHARD_PYTHON");
  if (from_environment != nullptr && *from_environment != '\0') {
    return from_environment;
  }
  std::error_code error;
  std::vector<std::filesystem::path> folders{""};
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    folders.push_back(program.parent_path());
    folders.push_back(program.parent_path().parent_path());
  }
  for (const std::filesystem::path& folder : folders) {
    const auto python = folder / ".venv/bin/python";
    if (std::filesystem::exists(python, error)) {
      return python.string();
    }
  }
  return "python3";
}

PythonChild::PythonChild(
    const PythonTokenizerOptions& options,
    const std::string& mode,
    std::string_view input)
    : python_(find_python(options.python)) {
  std::FILE* input_file = file_with(input);
  std::array<int, 2> pipe_ends{};
  if (::pipe2(pipe_ends.data(), O_CLOEXEC) != 0) {
    std::fclose(input_file);
    FLATSHARD_THROW(io, "cannot make a pipe: {}", std::strerror(errno));
  }
  const std::string tokenizer = options.tokenizer.string();
  std::array<const char*, 9> arguments{
      python_.c_str(),
      "-c",
      kPrepareScript,
      mode.c_str(),
      tokenizer.c_str(),
      options.end_of_document.c_str(),
      options.begin_of_document.c_str(),
      options.text_field.c_str(),
      nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fileno(input_file), 0);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], 1);
  const int error = ::posix_spawnp(
      &pid_,
      python_.c_str(),
      &actions,
      nullptr,
      const_cast<char* const*>(arguments.data()),
      environ);
  posix_spawn_file_actions_destroy(&actions);
  std::fclose(input_file);
  ::close(pipe_ends[1]);
  if (error != 0) {
    ::close(pipe_ends[0]);
    FLATSHARD_THROW(
        config,
        "cannot start Python '{}': {}; a tokenizer.json needs a Python with "
        "the tokenizers package, a .parquet file one with pyarrow: give "
        "--python or set FLATSHARD_PYTHON",
        python_,
        std::strerror(error));
  }
  stream_ = ::fdopen(pipe_ends[0], "rb");
  read_header();
}

PythonChild::~PythonChild() {
  if (stream_ != nullptr) {
    std::fclose(stream_);
  }
  if (pid_ > 0) {
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, nullptr, 0);
  }
}

void PythonChild::read_header() {
  std::string line;
  for (int c = std::fgetc(stream_); c != EOF && c != '\n';
       c = std::fgetc(stream_)) {
    line.push_back(static_cast<char>(c));
  }
  const auto header = nlohmann::json::parse(line, nullptr, false);
  FLATSHARD_CHECK(
      header.is_object(),
      config,
      "Python '{}' ended at once; see its message above, or give another with "
      "--python or FLATSHARD_PYTHON",
      python_);
  FLATSHARD_CHECK(
      !header.contains("error"),
      config,
      "{} (this Python is {}; name another with --python or FLATSHARD_PYTHON)",
      header.value("error", ""),
      python_);
  vocab_size_ = header.value("vocab_size", std::int64_t{0});
  end_of_document_ = header.value("end_of_document", std::int64_t{-1});
  if (header.contains("begin_of_document")) {
    begin_of_document_ = header.value("begin_of_document", std::int64_t{-1});
  }
  if (header.contains("own_begin")) {
    own_begin_ = {
        .id = header.value("own_begin_id", std::int64_t{0}),
        .text = header.value("own_begin", "")};
  }
}

void PythonChild::read(void* out, std::size_t nbytes) {
  FLATSHARD_CHECK(
      std::fread(out, 1, nbytes, stream_) == nbytes,
      io,
      "Python '{}' ended before it had read every file; see its message "
      "above",
      python_);
}

std::int64_t PythonChild::read_count() {
  std::int64_t count = 0;
  read(&count, sizeof(count));
  if (count < 0) {
    FLATSHARD_THROW(io, "{}", read_text());
  }
  return count;
}

std::string PythonChild::read_text() {
  std::int64_t nbytes = 0;
  read(&nbytes, sizeof(nbytes));
  std::string text(static_cast<std::size_t>(nbytes), '\0');
  read(text.data(), text.size());
  return text;
}

std::string file_list(
    const std::vector<InputFile>& files,
    std::optional<InputKind> only) {
  std::string all;
  for (const InputFile& file : files) {
    const InputKind kind = file.kind();
    if (!only || kind == *only) {
      all.push_back(
          kind == InputKind::text    ? 't'
          : kind == InputKind::jsonl ? 'j'
                                     : 'p');
      all += file.path.string();
      all.push_back('\0');
    }
  }
  return all;
}

PythonDocuments::PythonDocuments(
    const PythonTokenizerOptions& options,
    const std::vector<InputFile>& files)
    : child_(options, "files", file_list(files)) {
  if (!child_.begin_of_document() && child_.own_begin()) {
    log_warning(
        "the tokenizer puts '{0}' before each text where AutoTokenizer uses "
        "it, and this corpus has none; --begin-of-document '{0}' adds it",
        child_.own_begin()->text);
  }
}

std::int64_t PythonDocuments::next_document() {
  return child_.read_count();
}

void PythonDocuments::read(std::span<std::uint32_t> out) {
  child_.read(out.data(), out.size_bytes());
}

}  // namespace flatshard::data
