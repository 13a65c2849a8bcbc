#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace flatshard {

/// Adds `flatshard plan`. It prints the requirements of a run before it starts;
/// --calibrate measures this machine's GPU.
/// @param argv  of main: --calibrate starts ranks with it.
void add_plan_command(CLI::App& program, const std::vector<std::string>& argv);

}  // namespace flatshard
