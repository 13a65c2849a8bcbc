#include "flatshard/cli/config_command.h"

#include "flatshard/models/config.h"
#include "flatshard/train/config/run_config.h"

#include <CLI/CLI.hpp>

#include <fmt/ranges.h>

#include <memory>
#include <string>
#include <vector>

namespace flatshard {

void add_config_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "config",
      "Print a complete training config to start from, with a description of "
      "each key");
  struct Arguments {
    std::string preset;
    std::vector<std::string> overrides;
  };
  const auto arguments = std::make_shared<Arguments>();
  command
      ->add_option(
          "preset",
          arguments->preset,
          fmt::format(
              "Built-in architecture: {}",
              fmt::join(models::preset_names(), ", ")))
      ->required();
  command->add_option(
      "--set",
      arguments->overrides,
      "Override a key (section.key=value); can be repeated");
  command->footer("Example:\n  flatshard config llama3_1b > run.toml");
  command->callback([arguments] {
    const std::string start = to_toml(starting_config(arguments->preset));
    fmt::print(
        "{}",
        to_commented_toml(
            parse_config(start, arguments->preset, arguments->overrides)));
  });
}

}  // namespace flatshard
