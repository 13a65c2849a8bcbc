#include "flatshard/data/python_tokenizer.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

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

/// Returns the folder of the program, if the system names it.
std::optional<std::filesystem::path> program_folder() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::nullopt : std::optional(program.parent_path());
}

/// Returns the first arguments of Python for a module of the package: _run.py
/// next to the programs of a build, or above the program in an installed
/// package. Elsewhere, as in an editable installation, Python finds the package
/// itself, and that imports torch.
std::vector<std::string> module_arguments(const std::string& module) {
  const std::filesystem::path folder = program_folder().value_or("");
  std::error_code error;
  for (const auto& path :
       {folder / "python/flatshard",
        folder / "../python/flatshard",
        folder / "..",
        folder / "../share/flatshard/python/flatshard"}) {
    const std::filesystem::path script = path / "_run.py";
    if (std::filesystem::exists(script, error)) {
      return {script.string(), module};
    }
  }
  return {"-m", "flatshard." + module};
}

/// The command that runs a module of the package, and its environment.
struct PythonCommand {
  PythonCommand(
      const std::string& python,
      const std::string& module,
      const std::vector<std::string>& more)
      : arguments{python}, environment(child_environment()) {
    const auto first = module_arguments(module);
    arguments.insert(arguments.end(), first.begin(), first.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
  }

  static std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> found;
    for (std::string& text : texts) {
      found.push_back(text.data());
    }
    found.push_back(nullptr);
    return found;
  }

  std::vector<std::string> arguments;
  std::vector<std::string> environment;
};

[[noreturn]] void cannot_start(const std::string& python, int error) {
  FLATSHARD_THROW(
      config,
      "cannot start Python '{}': {}; texts and tokenizers are read by the "
      "Python package: give --python or set FLATSHARD_PYTHON",
      python,
      std::strerror(error));
}

/// Returns the output of client.py for all of its input.
std::string output_of(const std::string& python, std::string_view input) {
  PythonCommand command(python, "_data.client", {});
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      file_with(input),
      std::fclose);
  std::array<int, 2> output{};
  FLATSHARD_CHECK(
      ::pipe2(output.data(), O_CLOEXEC) == 0,
      io,
      "cannot make a pipe: {}",
      std::strerror(errno));
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream(
      ::fdopen(output[0], "rb"),
      std::fclose);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fileno(file.get()), 0);
  posix_spawn_file_actions_adddup2(&actions, output[1], 1);
  int pid = -1;
  const int error = ::posix_spawnp(
      &pid,
      python.c_str(),
      &actions,
      nullptr,
      PythonCommand::pointers(command.arguments).data(),
      PythonCommand::pointers(command.environment).data());
  posix_spawn_file_actions_destroy(&actions);
  ::close(output[1]);
  if (error != 0) {
    cannot_start(python, error);
  }
  std::string text;
  std::array<char, 1 << 14> part{};
  while (const auto count =
             std::fread(part.data(), 1, part.size(), stream.get())) {
    text.append(part.data(), count);
  }
  ::waitpid(pid, nullptr, 0);
  return text;
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
  if (const auto program = program_folder()) {
    folders.push_back(*program);
    folders.push_back(program->parent_path());
  }
  for (const std::filesystem::path& folder : folders) {
    const auto python = folder / ".venv/bin/python";
    if (std::filesystem::exists(python, error)) {
      return python.string();
    }
  }
  return "python3";
}

void exec_python(
    const std::string& python,
    const std::string& module,
    const std::vector<std::string>& arguments) {
  PythonCommand command(find_python(python), module, arguments);
  std::fflush(nullptr);
  ::execvpe(
      command.arguments.front().c_str(),
      PythonCommand::pointers(command.arguments).data(),
      PythonCommand::pointers(command.environment).data());
  cannot_start(command.arguments.front(), errno);
}

PythonAnswer ask_python(
    const PythonTokenizerOptions& options,
    const std::string& mode,
    const std::vector<std::string>& texts,
    const TokenLists& tokens) {
  using nlohmann::json;
  const json question{
      {"mode", mode},
      {"tokenizer", options.tokenizer.string()},
      {"parse_special", options.parse_special},
      {"keep_special", options.keep_special},
      {"chat_template_kwargs", options.chat_template_kwargs},
      {"texts", texts},
      {"tokens", tokens}};
  const std::string python = find_python(options.python);
  // Bytes that are not UTF-8 become U+FFFD.
  const std::string input =
      question.dump(-1, ' ', false, json::error_handler_t::replace);
  const json answer = json::parse(output_of(python, input), nullptr, false);
  FLATSHARD_CHECK(
      answer.is_object(),
      config,
      "Python '{}' ended at once; see its message above, or give another with "
      "--python or FLATSHARD_PYTHON",
      python);
  for (const json& warning : answer.at("warnings")) {
    log_warning("{}", warning.get<std::string>());
  }
  const std::string error = answer.value("error", "");
  const bool is_row = answer.at("is_row");
  FLATSHARD_CHECK(error.empty() || is_row, config, "{}", error);
  FLATSHARD_CHECK(error.empty(), format, "{}", error);
  return {
      .texts = answer.at("texts"),
      .tokens = answer.at("tokens"),
      .own_begin = answer.at("own_begin")};
}

}  // namespace flatshard::data
