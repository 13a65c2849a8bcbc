#include "flatshard/cli/path_options.h"

#include <CLI/Option.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "flatshard/core/home_folder.h"

namespace flatshard {
namespace {

constexpr std::array<std::string_view, 17> kPaths{
    "--run",
    "--compare",
    "--to",
    "--output",
    "--input",
    "--validation",
    "--tokenizer",
    "--corpus",
    "--data",
    "--prompts",
    "--messages",
    "--per-document",
    "--python",
    "--gpu",
    "--svg",
    "folder",
    "config"};

}  // namespace

void expand_home_in_paths(CLI::App& program) {
  for (CLI::Option* option : program.get_options()) {
    const std::string name = option->get_name();
    if (std::find(kPaths.begin(), kPaths.end(), name) != kPaths.end()) {
      option->transform(
          [](std::string text) { return expand_home(text); },
          "",
          "path");
    }
  }
  for (CLI::App* command :
       program.get_subcommands([](CLI::App*) { return true; })) {
    expand_home_in_paths(*command);
  }
}

}  // namespace flatshard
