#include "flatshard/cli/report_command.h"

#include "flatshard/core/file_writer.h"
#include "flatshard/report/report.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/metrics/charts.h"
#include "flatshard/train/tools/run_files.h"

#include <CLI/CLI.hpp>

#include <fmt/format.h>

#include <filesystem>
#include <memory>

namespace flatshard {
namespace {

struct ReportArguments {
  report::ReportOptions options;
  std::string output;
  bool json = false;
};

void report_runs(ReportArguments& arguments) {
  arguments.options.default_config = to_toml(Config());
  arguments.options.charts = charts_json();
  const std::string text = arguments.json
                               ? report::report_json(arguments.options) + "\n"
                               : report::report_page(arguments.options);
  if (arguments.output.empty() && arguments.json) {
    fmt::print("{}", text);
    return;
  }
  const std::filesystem::path path =
      arguments.output.empty()
          ? std::filesystem::path(arguments.options.run) / kRunReport
          : std::filesystem::path(arguments.output);
  for_option("--to", [&] { write_file_atomic(path, text); });
  fmt::print("wrote {} ({} kB)\n", path.string(), (text.size() + 999) / 1000);
}

}  // namespace

void add_report_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "report",
      "Create a self-contained HTML report of one or more runs");
  const auto arguments = std::make_shared<ReportArguments>();
  command->add_option("--run", arguments->options.run, "output_dir of a run")
      ->required();
  command->add_option(
      "--compare",
      arguments->options.compare,
      "output_dir of each run to compare with");
  command->add_option(
      "-o,--to,--output",
      arguments->output,
      "Output file [report.html in the directory of --run, or standard output "
      "with --json]");
  command->add_flag("--json", arguments->json, "Write all series as JSON");
  command->footer("Examples:\n"
                  "  flatshard report --run outputs/run\n"
                  "  flatshard report --run outputs/b --compare outputs/a --to "
                  "compared.html\n"
                  "  flatshard report --run outputs/run --json >run.json");
  command->callback([arguments] { report_runs(*arguments); });
}

}  // namespace flatshard
