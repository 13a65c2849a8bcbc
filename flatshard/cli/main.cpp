// The program `flatshard`.
#include "flatshard/cli/checkpoint_command.h"
#include "flatshard/cli/data_command.h"
#include "flatshard/cli/doctor_command.h"
#include "flatshard/cli/norms_command.h"
#include "flatshard/cli/train_command.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/nearest_name.h"

#include <CLI/CLI.hpp>

#include <csignal>
#include <exception>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kLongestShown = 80;

/// CLI11 calls a word that is no subcommand an unexpected argument.
void refuse_unknown_command(const CLI::App& program, int argc, char** argv) {
  const CLI::App* command = &program;
  std::string path;
  for (int i = 1; i < argc && argv[i][0] != '-'; ++i) {
    std::vector<std::string> names;
    const CLI::App* next = nullptr;
    for (const CLI::App* sub : command->get_subcommands({})) {
      names.push_back(sub->get_name());
      next = sub->check_name(argv[i]) ? sub : next;
    }
    if (names.empty()) {
      return;  // the rest is its arguments
    }
    const std::string word = argv[i];
    FLATSHARD_CHECK(
        next != nullptr,
        usage,
        "flatshard{} has no subcommand '{}'; did you mean '{}'? (all: "
        "flatshard{} --help)",
        path,
        word.substr(0, kLongestShown),
        flatshard::nearest_name(word, names),
        path);
    path += " " + word;
    command = next;
  }
}

}  // namespace

int main(int argc, char** argv) {
  // A file that grows past `ulimit -f` is an error with its name, not the end.
  std::signal(SIGXFSZ, SIG_IGN);
  CLI::App program{
      "Flatshard: fully sharded data-parallel training in C++",
      "flatshard"};
  program.require_subcommand(1);
  program.set_version_flag("--version", "flatshard " FLATSHARD_VERSION);
  flatshard::add_train_command(
      program,
      std::vector<std::string>(argv, argv + argc));
  flatshard::add_generate_command(program);
  flatshard::add_checkpoint_command(program);
  flatshard::add_export_command(program);
  flatshard::add_data_command(program);
  flatshard::add_norms_command(program);
  flatshard::add_doctor_command(
      program,
      std::vector<std::string>(argv, argv + argc));
  flatshard::add_info_command(program, FLATSHARD_VERSION);
  try {
    refuse_unknown_command(program, argc, argv);
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return program.exit(e);
  } catch (const std::exception& e) {
    flatshard::report_failure(e);
    return 1;
  }
  return 0;
}
