#pragma once

#include <CLI/App.hpp>

#include <exception>
#include <string>
#include <vector>

namespace flatshard {

/// Adds `train`. @param argv  main's own, to start local ranks with.
void add_train_command(CLI::App& program, const std::vector<std::string>& argv);

/// Writes the error to standard error, once for all local ranks of a job.
void report_failure(const std::exception& error);

}  // namespace flatshard
