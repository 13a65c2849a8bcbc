#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Has every option and argument of the program that is a path begin at the
/// home folder when it begins with `~`: shells leave `--to=~/x` and quoted
/// words as they are. Call it when all commands exist.
void expand_home_in_paths(CLI::App& program);

}  // namespace flatshard
