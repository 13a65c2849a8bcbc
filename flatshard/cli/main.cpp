// The program `flatshard`.
#include "flatshard/cli/checkpoint_command.h"
#include "flatshard/cli/completion_command.h"
#include "flatshard/cli/config_command.h"
#include "flatshard/cli/data_command.h"
#include "flatshard/cli/doctor_command.h"
#include "flatshard/cli/evaluate_command.h"
#include "flatshard/cli/generate_command.h"
#include "flatshard/cli/norms_command.h"
#include "flatshard/cli/path_options.h"
#include "flatshard/cli/plan_command.h"
#include "flatshard/cli/report_command.h"
#include "flatshard/cli/train_command.h"
#include "flatshard/core/log.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/core/output.h"

#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

namespace {

// The exit code that a shell derives from SIGPIPE.
constexpr int kNobodyReads = 128 + SIGPIPE;
constexpr int kUsage = 2;
constexpr std::size_t kLongestShown = 80;

std::vector<const CLI::App*> subcommands(const CLI::App& command) {
  return command.get_subcommands([](const CLI::App*) { return true; });
}

/// "; did you mean 'x'?", or all there are.
std::string suggestion(
    const std::string& word,
    const std::vector<std::string>& names) {
  const std::string near = flatshard::near_name(word, names);
  return near.empty()
             ? fmt::format("; expected one of {}", fmt::join(names, ", "))
             : fmt::format("; did you mean '{}'?", near);
}

/// CLI11 reports an unknown subcommand as an unexpected argument.
/// @return the error text; empty if there is no error.
std::string unknown_command(const CLI::App& program, int argc, char** argv) {
  const CLI::App* command = &program;
  std::string path;
  for (int i = 1; i < argc && argv[i][0] != '-'; ++i) {
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* sub : subcommands(*command)) {
      names.push_back(sub->get_name());
      next = sub->check_name(argv[i]) ? sub : next;
    }
    if (names.empty()) {
      return {};  // the rest is its arguments
    }
    const std::string word = argv[i];
    if (next == nullptr) {
      return fmt::format(
          "flatshard{} has no subcommand '{}'{}",
          path,
          word.substr(0, kLongestShown),
          suggestion(word, names));
    }
    path += " " + word;
    command = next;
  }
  return {};
}

/// Returns the error in the arguments, on one line.
std::string describe(const CLI::ParseError& error, const CLI::App& program) {
  const std::vector<std::string> rest = program.remaining(true);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr ||
      rest.empty()) {
    return error.what();
  }
  const CLI::App* command = &program;
  std::string path = "flatshard";
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += " " + command->get_name();
  }
  std::vector<std::string> names;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back("--" + name);
    }
  }
  const std::string word = rest.front().substr(0, rest.front().find('='));
  return fmt::format(
      "{} has no {} '{}'{}",
      path,
      word.starts_with('-') ? "option" : "further argument",
      word.substr(0, kLongestShown),
      word.starts_with('-') ? suggestion(word, names) : "");
}

/// Returns the usage of a command if a required subcommand is missing; empty
/// for other arguments.
std::string usage_of_group(const CLI::App& program, int argc, char** argv) {
  const CLI::App* command = &program;
  std::string parents;
  for (int i = 1; i < argc; ++i) {
    const auto subs = subcommands(*command);
    const auto next = std::ranges::find_if(subs, [&](const CLI::App* sub) {
      return sub->check_name(argv[i]);
    });
    if (next == subs.end()) {
      return {};
    }
    parents += (i > 1 ? " " : "") + command->get_name();
    command = *next;
  }
  return subcommands(*command).empty() ? std::string() : command->help(parents);
}

int run(CLI::App& program, int argc, char** argv) {
  const std::string unknown = unknown_command(program, argc, argv);
  if (!unknown.empty()) {
    flatshard::log_error("{}", unknown);
    return kUsage;
  }
  const std::string usage = usage_of_group(program, argc, argv);
  if (!usage.empty()) {
    fmt::print("{}", usage);
    return kUsage;
  }
  try {
    program.parse(argc, argv);
  } catch (const CLI::RuntimeError& e) {
    return e.get_exit_code();  // the command has printed its error
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) {
      return program.exit(e);  // --help and --version
    }
    flatshard::log_error("{}", describe(e, program));
    return kUsage;
  } catch (const std::system_error& e) {
    if (e.code() == std::errc::broken_pipe) {
      return kNobodyReads;  // `| head`, where SIGPIPE is ignored
    }
    flatshard::report_failure(e);
    return 1;
  } catch (const std::exception& e) {
    flatshard::report_failure(e);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  flatshard::open_standard_streams();
  // A file that grows past `ulimit -f` is an error with its name, not the end.
  std::signal(SIGXFSZ, SIG_IGN);
  // Without the exit codes of its children the program cannot see whether they
  // failed.
  std::signal(SIGCHLD, SIG_DFL);
  CLI::App program{
      "Flatshard: fully sharded data-parallel training in C++",
      "flatshard"};
  program.require_subcommand(1);
  program.set_version_flag("--version", "flatshard " FLATSHARD_VERSION);
  flatshard::add_train_command(
      program,
      std::vector<std::string>(argv, argv + argc));
  flatshard::add_config_command(program);
  flatshard::add_plan_command(
      program,
      std::vector<std::string>(argv, argv + argc));
  flatshard::add_generate_command(program);
  flatshard::add_evaluate_command(program);
  flatshard::add_checkpoint_command(program);
  flatshard::add_export_command(program);
  flatshard::add_data_command(program);
  flatshard::add_norms_command(program);
  flatshard::add_report_command(program);
  flatshard::add_doctor_command(
      program,
      std::vector<std::string>(argv, argv + argc));
  flatshard::add_info_command(program, FLATSHARD_VERSION);
  flatshard::add_completion_command(program);
  flatshard::expand_home_in_paths(program);
  return run(program, argc, argv);
}
