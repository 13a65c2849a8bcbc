#include "flatshard/cli/checkpoint_command.h"

#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>

#include "flatshard/core/error.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/format/read_plan.h"
#include "flatshard/train/tools/export_hf.h"
#include "flatshard/train/tools/stored_model.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolderHelp =
    "output_dir of a run, its checkpoint directory, or one checkpoint "
    "(.../step-100)";

double gigabytes(std::uint64_t nbytes) {
  return static_cast<double>(nbytes) * 1e-9;
}

std::uint64_t total_nbytes(const Manifest& manifest) {
  std::uint64_t nbytes = 0;
  for (const StoredFile& file : manifest.files) {
    nbytes += file.nbytes;
  }
  return nbytes;
}

std::vector<std::int64_t> checkpoints_in(const fs::path& folder) {
  const auto steps = list_checkpoints(folder);
  FLATSHARD_CHECK(
      !steps.empty(),
      io,
      "expected folders step-N with a {} in {}, found none",
      kManifestName,
      folder.string());
  return steps;
}

void list(const std::string& text) {
  const fs::path folder = checkpoints_of(text);
  const auto steps = checkpoints_in(folder);
  const auto latest = latest_checkpoint(folder);
  for (const std::int64_t step : steps) {
    const Manifest manifest = read_manifest(step_folder(folder, step));
    fmt::print(
        "step {:<10} {:>10.3f} GB  {} files  written by {} {}{}\n",
        step,
        gigabytes(total_nbytes(manifest)),
        manifest.files.size(),
        manifest.strategy,
        manifest.mesh,
        step == latest ? "  latest" : "");
  }
}

void inspect(const std::string& folder, bool with_tensors, bool with_config) {
  const fs::path path = find_checkpoint(folder);
  const Manifest manifest = read_manifest(path);
  fmt::print(
      "{}\nstep      {}\nwritten   by {} on {}\nfiles     {}, {:.3f} GB\n",
      path.string(),
      manifest.step,
      manifest.strategy,
      manifest.mesh,
      manifest.files.size(),
      gigabytes(total_nbytes(manifest)));
  for (const auto& [role, tensors] : manifest.tensors) {
    std::int64_t numel = 0;
    for (const auto& [name, tensor] : tensors) {
      numel += tensor.numel();
    }
    fmt::print("{:<9} {} tensors, {} elements\n", role, tensors.size(), numel);
  }
  for (const auto& [key, text] : manifest.state) {
    if (text.find('\n') == std::string::npos) {
      fmt::print("state     {}: {}\n", key, text);
    }
  }
  if (with_tensors) {
    for (const auto& [role, tensors] : manifest.tensors) {
      for (const auto& [name, tensor] : tensors) {
        fmt::print(
            "{}  {} [{}]  {} pieces\n",
            describe_tensor(role, name),
            tensor.dtype,
            fmt::join(tensor.shape, ", "),
            tensor.pieces.size());
      }
    }
  }
  if (with_config) {
    const auto config = manifest.state.find("config");
    fmt::print("{}", config == manifest.state.end() ? "" : config->second);
  }
}

void verify(const std::string& folder, int num_threads) {
  const fs::path path = find_checkpoint(folder);
  const Manifest manifest = read_manifest(path);
  check_files(path, manifest);
  const auto begin = std::chrono::steady_clock::now();
  read_chunks(path, manifest, plan_whole_files(manifest), {}, num_threads);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  const std::uint64_t nbytes = total_nbytes(manifest);
  fmt::print(
      "{}: OK ({} files, {:.3f} GB, all checksums match, {:.2f} GB/s)\n",
      path.string(),
      manifest.files.size(),
      gigabytes(nbytes),
      gigabytes(nbytes) / seconds);
}

void prune(const std::string& text, std::int64_t keep) {
  const fs::path folder = checkpoints_of(text);
  checkpoints_in(folder);
  const auto removed = prune_checkpoints(folder, keep);
  fmt::print(
      "removed {} checkpoints{}{}\n",
      removed.size(),
      removed.empty() ? "" : ": step ",
      fmt::to_string(fmt::join(removed, ", ")));
}

}  // namespace

void add_checkpoint_command(CLI::App& program) {
  CLI::App* checkpoint = program.add_subcommand(
      "checkpoint",
      "List, inspect, verify and remove checkpoints");
  checkpoint->require_subcommand(1);
  struct Arguments {
    std::string folder;
    std::int64_t keep = 0;
    int threads = static_cast<int>(std::thread::hardware_concurrency());
    bool tensors = false;
    bool config = false;
  };
  const auto arguments = std::make_shared<Arguments>();
  const auto add = [&](const char* name, const char* help) {
    CLI::App* command = checkpoint->add_subcommand(name, help);
    command
        ->add_option(
            "--run,folder",
            arguments->folder,
            std::string(kFolderHelp) + ", with or without --run")
        ->required();
    return command;
  };

  add("list", "List the checkpoints of a directory, one per line")
      ->callback([arguments] { list(arguments->folder); });

  CLI::App* inspector = add("inspect", "Print the contents of a checkpoint");
  inspector->add_flag(
      "--tensors",
      arguments->tensors,
      "Also print every tensor");
  inspector->add_flag(
      "--config",
      arguments->config,
      "Also print the config of the run that wrote it");
  inspector->callback([arguments] {
    inspect(arguments->folder, arguments->tensors, arguments->config);
  });

  CLI::App* verifier =
      add("verify", "Read every byte of a checkpoint and compare checksums");
  verifier
      ->add_option(
          "--threads",
          arguments->threads,
          "Number of reader threads [all cores]")
      ->check(CLI::Range(1, 1024));
  verifier->callback(
      [arguments] { verify(arguments->folder, arguments->threads); });

  CLI::App* pruner = add(
      "prune",
      "Remove old checkpoints; the one that `latest` points to is always kept");
  pruner->add_option("--keep", arguments->keep, "Number of checkpoints to keep")
      ->required()
      ->check(CLI::PositiveNumber);
  pruner->callback([arguments] { prune(arguments->folder, arguments->keep); });
}

void add_export_command(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "export",
      "Export the weights of a checkpoint to a Hugging Face model directory");
  const auto options = std::make_shared<ExportOptions>();
  command->add_option("--run", options->run, kFolderHelp)->required();
  command->add_option("--step", options->step, "Step to export [the latest]")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--to", options->to, "Output directory")->required();
  command
      ->add_option(
          "--dtype",
          options->dtype,
          "Data type of the exported weights: float32, bfloat16 or float16 [as "
          "stored]")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  command->add_flag(
      "--fp8",
      options->fp8,
      "Export linear layers as F8_E4M3 with weight_scale_inv (128 x 128 "
      "blocks), all other weights as bfloat16");
  command->add_flag(
      "--merge",
      options->merge,
      "For a run with adapters: export the base model with the adapters merged "
      "into it [only the adapters, in PEFT format]");
  command->footer(
      "Example:\n  flatshard export --run outputs/run --to outputs/hf --dtype "
      "bfloat16");
  command->callback([options] { fmt::print("{}\n", export_hf(*options)); });
}

}  // namespace flatshard
