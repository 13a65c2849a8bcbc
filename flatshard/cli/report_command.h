#pragma once

#include <CLI/App.hpp>

namespace flatshard {

/// `flatshard report`: what runs measured, as a page or as JSON.
void add_report_command(CLI::App& program);

}  // namespace flatshard
