#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Adds `norms`.
void add_norms_command(CLI::App& program);

}  // namespace flatshard
