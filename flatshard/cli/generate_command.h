#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Adds `generate`.
void add_generate_command(CLI::App& program);

}  // namespace flatshard
