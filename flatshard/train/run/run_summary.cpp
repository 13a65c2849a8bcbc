#include "flatshard/train/run/run_summary.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <optional>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/models/flops.h"
#include "flatshard/train/data/epochs.h"
#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/plan/planned_run.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/tools/run_files.h"

namespace flatshard {
namespace {

std::string memory_table(
    const RunSummary& summary,
    const std::vector<MemoryRow>& rows) {
  std::vector<MemoryRow> host_rows;
  if (summary.config.optimizer.offload_states) {
    host_rows.push_back(
        {"optimizer state",
         summary.state.optimizer->host_state_nbytes(),
         "of the main weights' shard"});
  }
  if (summary.config.activation_checkpoint.offload) {
    host_rows.push_back(
        {"activations",
         offloaded_nbytes(summary.config, summary.model),
         "of recomputed parts, pinned in the first step"});
  }
  if (summary.config.checkpoint.interval > 0) {
    host_rows.push_back(
        {"checkpoint",
         summary.staging_nbytes,
         "two buffers, from which checkpoints are written"});
  }
  return to_string(rows, host_rows);
}

std::string active_text(const models::ModelConfig& model) {
  return model.moe.num_experts == 0
             ? ""
             : fmt::format(
                   ", {} of them active for a token",
                   with_commas(models::num_active_parameters(model)));
}

/// Returns a line for each dataset with packed documents.
std::vector<std::string> packing_lines(const RunSummary& summary) {
  std::vector<std::string> lines;
  const auto& sources = summary.loader.sources();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (const auto packing = sources[i].source->packing()) {
      lines.push_back(fmt::format(
          "data: {}: {}",
          summary.config.data.train.at(i).path,
          packing->describe()));
    }
  }
  return lines;
}

std::string shared_layers_text(const Config& config) {
  const config::Parallelism& p = config.parallelism;
  std::string text;
  if (p.shares_layers()) {
    text += fmt::format(
        ", each {} of which share their layers",
        p.tensor_parallel_degree);
  }
  if (p.shares_sequences()) {
    text += fmt::format(
        ", each {} of which share their sequences",
        p.context_parallel_degree);
    if (p.context_hosts() > 1) {
      text += fmt::format(
          " (a2a over {}, all-gather over {})",
          p.head_ranks(),
          p.context_hosts());
    }
  }
  if (p.expert_tensor_parallel_degree > 1) {
    text += fmt::format(
        ", each {} of which share the width of their experts",
        p.expert_tensor_parallel_degree);
  }
  return text;
}

std::string lora_text(const RunSummary& summary) {
  if (!summary.state.lora) {
    return "";
  }
  return fmt::format(
      ", frozen; LoRA: {} parameters of the adapters of {} layers are trained",
      with_commas(num_trainable_parameters(summary.config.lora, summary.model)),
      summary.state.lora->num_modules);
}

std::string overlap_text(const RunSummary& summary) {
  std::string text;
  if (summary.state.num_in_flight > 1) {
    text += fmt::format(", {} in flight", summary.state.num_in_flight);
  }
  if (summary.config.parallelism.delay_wgrad) {
    text += ", weight gradients after the others";
  }
  return text;
}

}  // namespace

std::string to_string(const RunSummary& summary) {
  const Config& config = summary.config;
  // A restart of the same run on the same ranks adds nothing.
  std::optional<Config> before;
  const auto path = std::filesystem::path(config.run.output_dir) / kRunConfig;
  if (summary.goes_on && std::filesystem::exists(path)) {
    try {
      before = load_config(path);
    } catch (const Error&) {}  // written by another version: treated as missing
  }
  const std::string changed =
      before ? differing_keys(config, *before) : summary.set_keys;
  std::vector<std::string> parts;
  if (!before) {
    parts.push_back(fmt::format(
        "config: {} has all keys; these are not the default\n{}",
        path.string(),
        changed));
  } else if (!changed.empty()) {
    parts.push_back(
        fmt::format("config: changed since the run's last start\n{}", changed));
  }
  parts.push_back(fmt::format(
      "model: {} parameters{}{}; {} ranks of {}{}; strategy {}; copy engines "
      "{}; {} microbatch{} per step{}",
      with_commas(models::num_parameters(summary.model)),
      active_text(summary.model),
      lora_text(summary),
      summary.mesh.size(),
      summary.mesh.device().is_cuda() ? "GPU" : "CPU",
      shared_layers_text(config),
      strategy_name(config.parallelism),
      config::word_of(std::optional(summary.state.copy_engines)),
      summary.num_microbatches,
      summary.num_microbatches == 1 ? "" : "es",
      overlap_text(summary)));
  for (std::string& line : packing_lines(summary)) {
    parts.push_back(std::move(line));
  }
  for (const DataEpochs& data :
       data_epochs(config.data.train, summary.loader, config.training.steps)) {
    parts.push_back(to_string(data));
  }
  if (const Float8Effect& float8 = summary.state.float8;
      !float8.text.empty() && !float8.is_none) {
    parts.push_back(float8.text);
  }
  if (!config.optimizer.param_groups.empty() ||
      config.optimizer.decay != Decay::all ||
      config.optimizer.name == Algorithm::muon) {
    parts.push_back(
        "parameter groups of the optimizer:\n" +
        summary.state.optimizer->parameter_groups().table());
  }
  if (!before || !changed.empty()) {
    parts.push_back(fmt::format(
        "tflops and mfu count {} N + 12 L d T per token (attention as if it "
        "were not causal, no recompute): {} per token",
        summary.state.lora ? "6 trained + 4 frozen" : "6",
        format_flop(summary.flops_per_token)));
    if (config.parallelism.memory_budget > 0) {
      parts.push_back(fmt::format(
          "parallelism.memory_budget: {} of {} units stay unsharded between "
          "forward and backward",
          summary.state.num_kept_units,
          summary.state.runtime->units().size()));
    }
    const auto rows = memory_rows(summary.state);
    parts.push_back(memory_table(summary, rows));
    const at::Device device = summary.mesh.device();
    std::string lines = advice(
        summary.advice,
        total_nbytes(rows),
        device.is_cuda() ? memory_stats(device).capacity_bytes : 0);
    if (!lines.empty()) {
      parts.push_back(std::move(lines));
    }
  }
  return fmt::to_string(fmt::join(parts, "\n"));
}

}  // namespace flatshard
