#include "flatshard/cli/norms_command.h"

#include "flatshard/train/metrics/norms_report.h"

#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <memory>

namespace flatshard {

void add_norms_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "norms",
      "Print the norms of weights and gradients that a run logged "
      "(diagnostics.norms_freq)");
  const auto options = std::make_shared<NormsReportOptions>();
  command->add_option("--run", options->run, "output_dir of the run")
      ->required();
  command->add_option("--step", options->step, "Step to print [the last]")
      ->check(CLI::PositiveNumber);
  command
      ->add_option(
          "--sort",
          options->sort,
          "Sort order: model, or by weight, grad or ratio (grad / weight) with "
          "the largest first [model]")
      ->check(CLI::IsMember({"model", "weight", "grad", "ratio"}));
  command
      ->add_option(
          "--top",
          options->top,
          "Number of rows to print (0 for "
          "all) [0]")
      ->check(CLI::NonNegativeNumber);
  command->footer(
      "Example:\n  flatshard norms --run outputs/run --sort ratio --top 20");
  command->callback([options] { fmt::print("{}\n", norms_report(*options)); });
}

}  // namespace flatshard
