#include "flatshard/data/python_tokenizer.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/data/prepare_script.h"

extern char** environ;

namespace flatshard::data {
namespace {

/// Returns a temporary file, already deleted, with `content` and positioned at
/// its start. A pipe could fill up, or break when the child ends early.
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

/// This process' environment for a Python that imports nothing from the working
/// folder: PYTHONPATH without it (an empty part of it means that folder), and
/// PYTHONSAFEPATH, as `python -P`.
std::vector<std::string> child_environment() {
  constexpr std::string_view kPath = "PYTHONPATH=";
  std::error_code error;
  const auto here = std::filesystem::current_path(error);
  std::vector<std::string> variables{"PYTHONSAFEPATH=1"};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    std::string_view text(*variable);
    if (text.starts_with("PYTHONSAFEPATH=")) {
      continue;
    }
    if (!text.starts_with(kPath)) {
      variables.emplace_back(text);
      continue;
    }
    std::string kept;
    for (text.remove_prefix(kPath.size()); !text.empty();
         text.remove_prefix(std::min(text.find(':'), text.size() - 1) + 1)) {
      const std::string part(text.substr(0, text.find(':')));
      std::error_code same;
      if (!part.empty() && !std::filesystem::equivalent(part, here, same)) {
        kept += (kept.empty() ? "" : ":") + part;
      }
    }
    if (!kept.empty()) {
      variables.push_back(std::string(kPath) + kept);
    }
  }
  return variables;
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
    std::optional<std::string_view> input)
    : python_(find_python(options.python)) {
  std::array<int, 2> output{};
  std::array<int, 2> sockets{-1, -1};
  std::FILE* input_file = input ? file_with(*input) : nullptr;
  if (::pipe2(output.data(), O_CLOEXEC) != 0 ||
      (!input &&
       ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()) !=
           0)) {
    FLATSHARD_THROW(io, "cannot make a pipe: {}", std::strerror(errno));
  }
  input_ = sockets[0];
  stream_ = ::fdopen(output[0], "rb");
  try {
    start(options, mode, input ? fileno(input_file) : sockets[1], output[1]);
    if (input_file != nullptr) {
      std::fclose(input_file);
      input_file = nullptr;
    }
    if (sockets[1] >= 0) {
      ::close(std::exchange(sockets[1], -1));
    }
    ::close(std::exchange(output[1], -1));
    read_header();
  } catch (...) {
    if (input_file != nullptr) {
      std::fclose(input_file);
    }
    for (const int fd : {sockets[1], output[1]}) {
      if (fd >= 0) {
        ::close(fd);
      }
    }
    end();
    throw;
  }
}

void PythonChild::start(
    const PythonTokenizerOptions& options,
    const std::string& mode,
    int input,
    int output) {
  const std::string settings = nlohmann::json{
      {"tokenizer", options.tokenizer.string()},
      {"end", options.end_of_document},
      {"begin", options.begin_of_document},
      {"text_field", options.text_field},
      {"parse_special", options.parse_special},
      {"train_on", options.train_on},
      {"chat_template_kwargs", options.chat_template_kwargs},
      {"keep_special",
       options.keep_special}}.dump();
  std::array<const char*, 6> arguments{
      python_.c_str(),
      "-c",
      kPrepareScript,
      mode.c_str(),
      settings.c_str(),
      nullptr};
  const std::vector<std::string> variables = child_environment();
  std::vector<char*> environment;
  for (const std::string& variable : variables) {
    environment.push_back(const_cast<char*>(variable.c_str()));
  }
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, 0);
  posix_spawn_file_actions_adddup2(&actions, output, 1);
  const int error = ::posix_spawnp(
      &pid_,
      python_.c_str(),
      &actions,
      nullptr,
      const_cast<char* const*>(arguments.data()),
      environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    pid_ = -1;
    FLATSHARD_THROW(
        config,
        "cannot start Python '{}': {}; a tokenizer.json needs a Python with "
        "the tokenizers package, a .parquet file one with pyarrow: give "
        "--python or set FLATSHARD_PYTHON",
        python_,
        std::strerror(error));
  }
}

PythonChild::~PythonChild() {
  end();
}

void PythonChild::end() {
  end_input();
  if (stream_ != nullptr) {
    std::fclose(stream_);
    stream_ = nullptr;
  }
  if (pid_ > 0) {
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
}

bool PythonChild::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(input_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      return false;  // it has ended, and `read` reports why
    }
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

void PythonChild::end_input() {
  if (input_ >= 0) {
    ::close(std::exchange(input_, -1));
  }
}

void PythonChild::kill() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
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
  own_begin_ = header.value("own_begin", own_begin_);
  for (const auto& warning :
       header.value("warnings", std::vector<std::string>())) {
    log_warning("{}", warning);
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

void PythonChild::read_bytes(std::string& text, std::int64_t nbytes) {
  text.resize(static_cast<std::size_t>(nbytes));
  read(text.data(), text.size());
}

// prepare_tokens.py defines the numbers below zero.
std::int64_t PythonChild::read_frame() {
  constexpr std::int64_t kError = -1;
  constexpr std::int64_t kWarning = -3;
  constexpr std::int64_t kUnreadable = -4;
  for (;;) {
    std::int64_t count = 0;
    read(&count, sizeof(count));
    if (count != kError && count != kWarning && count != kUnreadable) {
      return count;
    }
    std::int64_t nbytes = 0;
    read(&nbytes, sizeof(nbytes));
    std::string text;
    read_bytes(text, nbytes);
    FLATSHARD_CHECK(count != kError, format, "{}", text);
    FLATSHARD_CHECK(count != kUnreadable, io, "{}", text);
    log_warning("{}", text);
  }
}

std::int64_t PythonChild::read_count() {
  const std::int64_t count = read_frame();
  FLATSHARD_CHECK(
      count >= 0,
      internal,
      "expected a document of Python, got the end of a file");
  return count;
}

std::string PythonChild::read_text() {
  std::string text;
  read_bytes(text, read_count());
  return text;
}

bool PythonChild::read_text_of_file(std::string& text) {
  const std::int64_t nbytes = read_frame();
  if (nbytes < 0) {
    return false;
  }
  read_bytes(text, nbytes);
  return true;
}

}  // namespace flatshard::data
