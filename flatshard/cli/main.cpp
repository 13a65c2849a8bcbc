// The program `flatshard`.
#include "flatshard/cli/checkpoint_command.h"
#include "flatshard/cli/data_command.h"
#include "flatshard/cli/norms_command.h"
#include "flatshard/cli/train_command.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

#include <CLI/CLI.hpp>

#include <csignal>
#include <exception>
#include <string>
#include <vector>

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
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return program.exit(e);
  } catch (const std::exception& e) {
    flatshard::report_failure(e);
    return 1;
  }
  return 0;
}
