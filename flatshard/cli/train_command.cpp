#include "flatshard/cli/train_command.h"

#include "flatshard/cli/rank_process.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/core/output.h"
#include "flatshard/data/corpus.h"
#include "flatshard/launch/environment.h"
#include "flatshard/launch/local_ranks.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/run/run_lock.h"
#include "flatshard/train/run/run_output.h"
#include "flatshard/train/run/save_signals.h"
#include "flatshard/train/run/trainer.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/tools/run_files.h"

#include <c10/util/Exception.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <sys/stat.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>

namespace flatshard {
namespace {

// A shell's exit code for a process that a signal ended is this plus the
// signal.
constexpr int kSignalExitCode = 128;

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  int nproc = 0;  // 0: not given, one rank
  std::string device = "auto";
  bool resume = false;
  int max_restarts = 0;
  bool profile = false;
  bool help_config = false;
};

/// Identifies the file config.toml of a run. The value changes when a new run
/// has started.
std::pair<std::uint64_t, std::int64_t> config_file(const Config& config) {
  struct stat info {};
  const auto path = std::filesystem::path(config.run.output_dir) / kRunConfig;
  if (::stat(path.c_str(), &info) != 0) {
    return {0, 0};
  }
  return {
      info.st_ino,
      info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec};
}

/// Starts the ranks, and again from the last checkpoint when they fail.
int spawn(
    const TrainArguments& arguments,
    const Config& config,
    std::vector<std::string> argv) {
  const auto before = config_file(config);
  bool resumes = arguments.resume;
  for (int restarts = 0;; ++restarts) {
    bool signalled = false;
    const int code = spawn_local_ranks(arguments.nproc, argv, &signalled);
    if (code == 0 || signalled || restarts == arguments.max_restarts) {
      return code;
    }
    // Before the run has started, the checkpoints are from an earlier run.
    if (!resumes && config_file(config) != before) {
      resumes = true;
      argv.emplace_back("--resume");
    }
    log_warning(
        "restart {} of {}, from the {}",
        restarts + 1,
        arguments.max_restarts,
        resumes ? "latest checkpoint" : "first step");
  }
}

/// Returns `word` quoted as one would type it in a shell.
std::string shell_word(const std::string& word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
                                      "OPQRSTUVWXYZ0123456789_-./=,:+@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
    return word;
  }
  std::string quoted = "'";
  for (const char c : word) {
    quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return quoted + "'";
}

std::string resume_command(
    const TrainArguments& arguments,
    const std::vector<std::string>& argv) {
  std::string command;
  for (const std::string& word : argv) {
    command += (command.empty() ? "" : " ") + shell_word(word);
  }
  return arguments.resume ? command : command + " --resume";
}

void report_stop(const Trainer::Stop& stop, const std::string& command) {
  const char* name = stop_signal_name(stop.signal);
  if (!stop.saved) {
    log_info(
        "stopped by {} after step {}; no checkpoint was saved because "
        "checkpoint.interval = 0",
        name,
        stop.step);
    return;
  }
  const bool by_others =
      launched_by_environment() && !launched_by_this_program();
  log_info(
      "stopped by {} after step {} and saved a checkpoint; resume{} with:\n  "
      "{}",
      name,
      stop.step,
      by_others ? ", under the same launcher," : "",
      command);
}

/// Returns whether the model of a run answers chats.
bool trains_chats(const Config& config) {
  try {
    return data::Corpus::open(config.data.train.front().path, "train")
        ->has_mask();
  } catch (const Error&) {
    return false;  // the dataset is gone
  }
}

/// Returns what to type after a run: three commands, or those that its files
/// suffice for.
std::vector<std::string> next_commands(
    const Config& config,
    const std::string& program) {
  const std::string run = shell_word(config.run.output_dir);
  const bool has_text = !config.data.train.front().is_random();
  std::vector<std::string> commands{
      fmt::format("{} report --run {}", program, run)};
  if (!config.run.save_weights && config.checkpoint.interval == 0) {
    return commands;
  }
  if (has_text) {
    commands.push_back(fmt::format(
        "{} generate --run {}{} --prompt \"Once upon a time\"",
        program,
        run,
        trains_chats(config) ? " --chat" : ""));
  }
  const std::string hf = shell_word(
      (std::filesystem::path(config.run.output_dir) / "hf").string());
  const bool exported = config.checkpoint.export_hf_at_end;
  if (config.checkpoint.interval > 0 && !exported) {
    commands.push_back(fmt::format(
        "{} export --run {} --to {}{}",
        program,
        run,
        hf,
        config.lora.enabled() ? " --merge" : ""));
  } else if (has_text && config.validation.freq > 0) {
    const auto& sets = config.data.validation.empty() ? config.data.train
                                                      : config.data.validation;
    commands.push_back(fmt::format(
        "{} evaluate {} {} --data {} --packing {}",
        program,
        exported ? "--hf" : "--run",
        exported ? hf : run,
        shell_word(sets.front().path),
        config::word_of(config.data.packing)));
  }
  return commands;
}

/// Ends the program as wrong options do.
[[noreturn]] void throw_usage(const std::string& text) {
  throw CLI::ParseError(text, CLI::ExitCodes::RequiredError);
}

void train(const TrainArguments& arguments, std::vector<std::string> argv) {
  if (arguments.help_config) {
    fmt::print("{}", describe_config());
    return;
  }
  if (arguments.config.empty()) {
    throw_usage("expected a config file: flatshard train CONFIG.toml");
  }
  std::vector<std::string> overrides = arguments.overrides;
  if (arguments.profile) {
    overrides.emplace_back("profiling.enabled=true");
  }
  const std::string conflict = slurm_conflict(arguments.nproc);
  if (!conflict.empty()) {
    throw_usage(conflict);
  }
  // In a batch script of Slurm, only --nproc starts ranks.
  const bool launched =
      launched_by_environment() &&
      (launched_by_this_program() || !in_slurm_batch_script());
  if (arguments.max_restarts > 0 && !launched && arguments.nproc <= 1) {
    throw_usage("--max-restarts requires --nproc, because it restarts the "
                "ranks that --nproc started; add --nproc or remove it");
  }
  std::vector<std::string> notes;
  const Config config = load_config(arguments.config, overrides, &notes);
  keep_output_in(
      std::filesystem::path(config.run.output_dir) / kRunLog,
      claim_output_notice);
  const bool is_first = !launched || (!launched_by_this_program() &&
                                      rank_environment_from_env().rank == 0);
  for (const std::string& note :
       is_first ? notes : std::vector<std::string>()) {
    log_info("note: {}", note);
  }
  if (!launched && arguments.nproc > 1) {
    // Before any rank starts.
    model_config(resolve_config(config, arguments.nproc, arguments.nproc));
    FLATSHARD_CHECK(
        arguments.max_restarts == 0 || config.checkpoint.interval > 0,
        config,
        "--max-restarts requires checkpoints to restart from; set "
        "checkpoint.interval to 1 or more");
    const int code = spawn(arguments, config, argv);
    if (code != 0) {
      throw CLI::RuntimeError(code);
    }
    return;
  }
  const RankEnvironment env =
      launched ? rank_environment_from_env() : RankEnvironment{};
  if (env.world_size > 1) {
    set_log_prefix(fmt::format("rank {}/{}", env.rank, env.world_size));
  }
  prepare_rank_process();
  // Not by way of the destructors: they wait for the peers, who wait for this
  // rank.
  const auto leave = [](const std::exception& error) {
    report_failure(error);
    RunLock::remove_file_at_exit();
    std::fflush(nullptr);
    std::_Exit(1);
  };
  Trainer trainer(
      config,
      env,
      arguments.device,
      arguments.resume,
      [leave](const Verdict& v) { leave(Error(v.code, v.text)); });
  std::optional<Trainer::Stop> stop;
  try {
    stop = trainer.run();
  } catch (const std::exception& e) {
    if (env.world_size == 1) {
      throw;
    }
    leave(e);
  }
  if (stop) {
    if (env.rank == 0) {
      report_stop(*stop, resume_command(arguments, argv));
    }
    throw CLI::RuntimeError(kSignalExitCode + stop->signal);
  }
  if (env.rank == 0) {
    log_info(
        "the run is in {}; next:\n  {}",
        config.run.output_dir,
        fmt::join(next_commands(config, shell_word(argv.front())), "\n  "));
  }
}

}  // namespace

void report_failure(const std::exception& error) {
  // Peers detect a failure by a closed connection, maybe before the rank that
  // failed has reported its error.
  constexpr int kPatienceMs = 1000;
  const auto* ours = dynamic_cast<const Error*>(&error);
  const bool of_a_peer =
      ours != nullptr &&
      (ours->code() == ErrorCode::comm || ours->code() == ErrorCode::timeout);
  // torch's errors carry a stack of C++ frames in what().
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  const char* text =
      torchs != nullptr ? torchs->what_without_backtrace() : error.what();
  if (claim_failure_report(of_a_peer ? kPatienceMs : 0)) {
    log_error("{}", text);
  } else {
    log_debug("{}", text);
  }
}

void add_train_command(
    CLI::App& program,
    const std::vector<std::string>& argv) {
  CLI::App* command =
      program.add_subcommand("train", "Train a model on all ranks of the job");
  const auto arguments = std::make_shared<TrainArguments>();
  command->add_option("config", arguments->config, "Config file (TOML)");
  command
      ->add_option(
          "--nproc",
          arguments->nproc,
          "Number of ranks to start on this machine [1]; ignored under "
          "torchrun and srun")
      ->check(CLI::Range(1, 1024));
  command->add_option(
      "--set",
      arguments->overrides,
      "Override a key of the config (section.key=value); can be repeated");
  command->add_option(
      "--device",
      arguments->device,
      "Device: auto, cpu or cuda [auto]");
  command->add_flag(
      "--resume",
      arguments->resume,
      "Resume from the latest checkpoint, or start from scratch if there is "
      "none");
  command
      ->add_option(
          "--max-restarts",
          arguments->max_restarts,
          "Number of times to restart all ranks from the latest checkpoint "
          "after a failure (with --nproc) [0]")
      ->check(CLI::Range(0, 1000000));
  command->add_flag(
      "--profile",
      arguments->profile,
      "Profile one step (profiling.step): write a Chrome trace and print a "
      "summary of GPU time (CPU time without a GPU)");
  command->add_flag(
      "--help-config",
      arguments->help_config,
      "Print every config key with its default and description");
  command->footer("Examples:\n"
                  "  flatshard train examples/demo.toml --nproc 2\n"
                  "  torchrun --no-python --nproc_per_node 8 flatshard train "
                  "run.toml --set training.steps=100");
  command->callback([arguments, argv] { train(*arguments, argv); });
}

}  // namespace flatshard
