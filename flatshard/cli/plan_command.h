#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace flatshard {

/// flatshard plan: what a run takes before it starts, and --calibrate, which
/// measures the GPU that it is planned for.
/// @param argv  of main: --calibrate starts ranks with it.
void add_plan_command(CLI::App& program, const std::vector<std::string>& argv);

}  // namespace flatshard
