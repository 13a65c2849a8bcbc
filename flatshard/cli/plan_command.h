#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace flatshard {

/// Adds `flatshard plan`, which prints what a run needs before it starts, and
/// with --calibrate measures this machine's GPU.
/// @param argv  of main: --calibrate starts ranks with it.
void add_plan_command(CLI::App& program, const std::vector<std::string>& argv);

}  // namespace flatshard
