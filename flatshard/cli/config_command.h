#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Adds `config`.
void add_config_command(CLI::App& program);

}  // namespace flatshard
