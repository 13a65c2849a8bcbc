#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Expands a leading `~` to the home folder in every path option and argument
/// of the program, because shells leave `--to=~/x` and quoted words unchanged.
/// Call it after all commands were added.
void expand_home_in_paths(CLI::App& program);

}  // namespace flatshard
