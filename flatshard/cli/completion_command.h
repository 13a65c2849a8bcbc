#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Adds `completion`. It prints a shell script that completes the commands and
/// options of `program`, and the config's keys after --set.
void add_completion_command(CLI::App& program);

}  // namespace flatshard
