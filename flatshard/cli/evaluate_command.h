#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Adds `evaluate`.
void add_evaluate_command(CLI::App& program);

}  // namespace flatshard
