#pragma once

#include <CLI/App.hpp>

#include <string>
#include <vector>

namespace flatshard {

/// Adds `doctor`. @param argv  main's own, to start local ranks with.
void add_doctor_command(
    CLI::App& program,
    const std::vector<std::string>& argv);
/// Adds `info`. @param version  of this program.
void add_info_command(CLI::App& program, const std::string& version);

}  // namespace flatshard
