#include "flatshard/cli/plan_command.h"

#include "flatshard/cli/rank_process.h"
#include "flatshard/comm/store.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/device/stream.h"
#include "flatshard/launch/environment.h"
#include "flatshard/launch/local_ranks.h"
#include "flatshard/plan/gpu.h"
#include "flatshard/plan/svg.h"
#include "flatshard/train/plan/calibrate.h"
#include "flatshard/train/plan/run_plan.h"
#include "flatshard/train/plan/sweep.h"
#include "flatshard/train/setup/run_device.h"
#include "flatshard/train/tools/stored_model.h"

#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

namespace flatshard {
namespace {

struct PlanArguments {
  std::string config;
  std::vector<std::string> overrides;
  PlannedMachines machines{.ranks = 0};
  std::string gpu = "h100";
  std::string tokens;
  bool sweep = false;
  std::string svg;
  bool json = false;
  bool calibrate = false;
  int nproc = 1;
  std::string device = "auto";
  std::string output;
};

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.close();
  FLATSHARD_CHECK(
      out.good(),
      io,
      "expected a file that can be written, got '{}'",
      path);
}

void run_calibration(
    const PlanArguments& arguments,
    const std::vector<std::string>& argv) {
  if (!launched_by_environment() && arguments.nproc > 1) {
    const int code = spawn_local_ranks(arguments.nproc, argv);
    if (code != 0) {
      throw CLI::RuntimeError(code);
    }
    return;
  }
  const RankEnvironment env = launched_by_environment()
                                  ? rank_environment_from_env()
                                  : RankEnvironment{};
  prepare_rank_process();
  const at::Device device = choose_device(arguments.device, env);
  set_current_device(device);
  const auto mesh = env.world_size == 1 ? Mesh::single(device)
                                        : Mesh::create(
                                              {{"dp", env.world_size}},
                                              env.rank,
                                              make_tcp_store(env),
                                              device);
  const plan::Gpu gpu = calibrate(
      *mesh,
      device.is_cuda() ? CalibrateOptions::for_gpus()
                       : CalibrateOptions::for_cpus(),
      [&](const std::string& what) {
        if (env.rank == 0) {
          log_info("measuring {}", what);
        }
      });
  if (env.rank != 0) {
    return;
  }
  // A table of the same kind gives the rates that are not measured.
  const std::string_view own = plan::table_of_device(gpu.name);
  const std::string_view base = own.empty() ? "h200" : own;
  const std::string text = fmt::format("base = \"{}\"\n{}", base, to_toml(gpu));
  if (arguments.output.empty()) {
    fmt::print("{}", text);
    return;
  }
  write_file(arguments.output, text);
  log_info("wrote {}", arguments.output);
}

[[noreturn]] void throw_plan_usage(const std::string& text) {
  throw CLI::ParseError(text, CLI::ExitCodes::RequiredError);
}

/// Ends the program when one of these options is given.
void refuse_unused(
    const std::vector<CLI::Option*>& options,
    std::string_view why) {
  for (const CLI::Option* option : options) {
    if (option->count() > 0) {
      throw_plan_usage(fmt::format("{} {}", option->get_name(), why));
    }
  }
}

/// Returns the config of a file, of a preset by its name, or of a Hugging Face
/// folder.
Config planned_config(const PlanArguments& arguments) {
  const auto presets = models::preset_names();
  if (std::ranges::find(presets, arguments.config) != presets.end()) {
    return config_of_preset(arguments.config, arguments.overrides);
  }
  const std::filesystem::path path = arguments.config;
  if (std::filesystem::is_directory(path)) {
    FLATSHARD_CHECK(
        std::filesystem::exists(path / kHfConfig),
        config,
        "expected a Hugging Face folder, with a {}, got '{}'",
        kHfConfig,
        arguments.config);
    return config_of_hf_config(path / kHfConfig, arguments.overrides);
  }
  const std::string near = near_name(arguments.config, presets);
  FLATSHARD_CHECK(
      std::filesystem::exists(path),
      config,
      "expected a config file, a Hugging Face folder, or a preset ({}), got "
      "'{}'{}",
      fmt::join(presets, ", "),
      arguments.config,
      near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  return load_config(arguments.config, arguments.overrides);
}

void plan(PlanArguments arguments) {
  if (arguments.config.empty()) {
    throw_plan_usage(
        "expected a config file or a preset: flatshard plan run.toml --ranks "
        "8");
  }
  if (arguments.machines.ranks == 0) {
    throw_plan_usage("plan requires --ranks, the number of GPUs of the run");
  }
  PlannedMachines& machines = arguments.machines;
  machines.gpu = plan::find_gpu(arguments.gpu);
  std::optional<double> tokens;
  if (!arguments.tokens.empty()) {
    tokens = plan::parse_tokens(arguments.tokens);
  }
  const Config config = planned_config(arguments);
  if (arguments.sweep) {
    if (!arguments.svg.empty() || tokens) {
      throw_plan_usage(
          "--sweep compares many configurations, so it cannot be combined with "
          "--svg or --tokens; use these without --sweep");
    }
    const Sweep found = sweep(config, machines);
    fmt::print(
        "{}",
        arguments.json ? to_json(found, machines) : to_string(found, machines));
    return;
  }
  const RunPlan run = plan_run(config, machines);
  if (!arguments.svg.empty()) {
    write_file(
        arguments.svg,
        plan::to_svg(
            run.estimate.step,
            fmt::format(
                "{} on {} ranks of {}",
                arguments.config,
                machines.ranks,
                machines.gpu.name),
            picture_text(run)));
  }
  fmt::print(
      "{}",
      arguments.json ? to_json(run, machines, tokens)
                     : to_string(run, machines, tokens));
}

void run_plan(
    const PlanArguments& arguments,
    const std::vector<std::string>& argv) {
  if (arguments.calibrate) {
    run_calibration(arguments, argv);
  } else {
    plan(arguments);
  }
}

}  // namespace

void add_plan_command(CLI::App& program, const std::vector<std::string>& argv) {
  CLI::App* command = program.add_subcommand(
      "plan",
      "Estimate the requirements of a run before it starts: memory per rank, "
      "step time and GPU-hours");
  const auto arguments = std::make_shared<PlanArguments>();
  command->add_option(
      "config",
      arguments->config,
      "Config file (TOML), Hugging Face model directory, or preset such as "
      "llama3_8b");
  command->add_option(
      "--set",
      arguments->overrides,
      "Override a key of the config (section.key=value); can be repeated");
  command->add_option("--ranks", arguments->machines.ranks, "Number of GPUs")
      ->check(CLI::Range(1, 1 << 20));
  command
      ->add_option(
          "--ranks-per-host",
          arguments->machines.ranks_per_host,
          "Number of GPUs per host; NVLink connects the GPUs of a host, and "
          "the network connects hosts [8]")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option(
      "--gpu",
      arguments->gpu,
      "GPU: h100, h200, b200, a100, or a file written by --calibrate [h100]");
  command->add_option(
      "--tokens",
      arguments->tokens,
      "Also print GPU-hours and days to train on this many tokens, such as 15T "
      "or 300B");
  command->add_flag(
      "--sweep",
      arguments->sweep,
      "Try strategies, replicas, activation checkpointing, batch sizes, FP8 "
      "and expert parallelism. Print the configurations that fit, fastest "
      "first, and those that do not");
  command->add_option(
      "--svg",
      arguments->svg,
      "Draw the timeline of the step to this file");
  command->add_flag(
      "--json",
      arguments->json,
      "Print the result as one JSON object");
  const std::vector<CLI::Option*> of_plans = command->get_options();
  const CLI::Option* calibrate = command->add_flag(
      "--calibrate",
      arguments->calibrate,
      "Measure the GPU and the links of this machine and write a file for "
      "--gpu");
  command
      ->add_option(
          "--nproc",
          arguments->nproc,
          "With --calibrate: number of ranks to measure links between, one per "
          "GPU [1]")
      ->check(CLI::Range(1, 1024));
  command->add_option(
      "--device",
      arguments->device,
      "With --calibrate: device, auto, cpu or cuda [auto]");
  command->add_option(
      "-o,--output",
      arguments->output,
      "With --calibrate: output file [standard output]");
  command->footer(
      "Examples:\n"
      "  flatshard plan llama3_8b --ranks 8\n"
      "  flatshard plan run.toml --ranks 512 --gpu h200 --tokens 15T\n"
      "  flatshard plan llama3_70b --ranks 64 --sweep\n"
      "  flatshard plan --calibrate --nproc 8 -o my_gpu.toml\n"
      "  flatshard plan run.toml --ranks 8 --gpu my_gpu.toml");
  std::vector<CLI::Option*> of_calibration = command->get_options();
  std::erase_if(of_calibration, [&](const CLI::Option* option) {
    return option == calibrate || std::ranges::count(of_plans, option) > 0;
  });
  command->callback([=] {
    refuse_unused(
        arguments->calibrate ? of_plans : of_calibration,
        arguments->calibrate
            ? "has no effect with --calibrate; remove one of the two"
            : "requires --calibrate; remove it to plan a run");
    run_plan(*arguments, argv);
  });
}

}  // namespace flatshard
