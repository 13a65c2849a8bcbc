#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Adds `checkpoint list`, `inspect`, `verify` and `prune`. Their callbacks
/// throw Error.
void add_checkpoint_command(CLI::App& program);
/// Adds `export`.
void add_export_command(CLI::App& program);

}  // namespace flatshard
