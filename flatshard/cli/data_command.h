#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// Adds `data prepare`, `import`, `info` and `show`. Their callbacks throw
/// Error.
void add_data_command(CLI::App& program);

}  // namespace flatshard
