#include "flatshard/train/plan/run_plan.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/device_name.h"
#include "flatshard/device/stream.h"
#include "flatshard/models/flops.h"
#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/plan/planned_run.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/setup/parallelism.h"
#include "flatshard/train/setup/run_lora.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

namespace flatshard {
namespace {

constexpr std::int64_t kPresetTokens = 8192;

std::string shown_gib(std::int64_t nbytes) {
  const double value = static_cast<double>(nbytes) / kGiB;
  return value < 1 ? fmt::format("{:.1f} MiB", value * 1024)
                   : fmt::format("{:.2f} GiB", value);
}

std::string ms(double seconds) {
  return fmt::format("{:.1f} ms", 1e3 * seconds);
}

std::string row(
    const std::string& name,
    const std::string& value,
    const std::string& remark = {}) {
  return remark.empty()
             ? fmt::format("  {:<22}{:>14}\n", name, value)
             : fmt::format("  {:<22}{:>14}  {}\n", name, value, remark);
}

/// Returns a number of days or hours: 0.012, 4.5, 1,719.
std::string amount_text(double value) {
  constexpr double kWhole = 100;
  return value < 1        ? fmt::format("{:.3f}", value)
         : value < kWhole ? fmt::format("{:.1f}", value)
                          : with_commas(std::llround(value));
}

/// Rejects options without a price.
void check_priced(const Config& config) {
  FLATSHARD_CHECK(
      config.precision.compute == at::kBFloat16,
      config,
      "precision.compute = {}: GPU files contain rates of bfloat16 matmuls; "
      "set precision.compute = \"bfloat16\" to plan the run",
      config::word_of(config.precision.compute));
}

/// Returns the groups of ranks that share layers or sequences; empty: there are
/// none.
std::string sharing_text(const config::Parallelism& p) {
  std::string text;
  if (p.shares_layers()) {
    text += fmt::format(", tensor parallelism {}", p.tensor_parallel_degree);
  }
  if (p.shares_sequences()) {
    text += fmt::format(", context parallelism {}", p.context_parallel_degree);
    if (p.context_hosts() > 1) {
      text += fmt::format(
          " (a2a over {}, all-gather over {})",
          p.head_ranks(),
          p.context_hosts());
    }
  }
  return text;
}

std::string recompute_text(const config::ActivationCheckpoint& keys) {
  return fmt::format(
      "{}{}{}",
      keys.layers ? fmt::format(" of {} blocks", *keys.layers) : "",
      keys.saves_attention() ? " except attention" : "",
      keys.offload ? ", offloaded" : "");
}

std::string headline(const RunPlan& plan, const PlannedMachines& machines) {
  const config::Training& training = plan.config.training;
  return fmt::format(
      "{} parameters{} on {} ranks of {}, {} a host\n"
      "strategy {}{}{}; recompute {}{}; FP8 {}; {} microbatch{} of {} x {} "
      "tokens\n",
      with_commas(models::num_parameters(plan.model)),
      plan.config.lora.enabled()
          ? fmt::format(
                " and {} of adapters",
                with_commas(
                    num_trainable_parameters(plan.config.lora, plan.model)))
          : "",
      with_commas(machines.ranks),
      machines.gpu.name,
      machines.ranks_per_host,
      strategy_name(plan.config.parallelism),
      plan.config.parallelism.data_parallel_replicate_degree > 1
          ? fmt::format(
                " ({} replicas of {} shards)",
                plan.config.parallelism.data_parallel_replicate_degree,
                plan.config.parallelism.data_parallel_shard_degree)
          : "",
      sharing_text(plan.config.parallelism),
      config::word_of(plan.config.activation_checkpoint.mode),
      recompute_text(plan.config.activation_checkpoint),
      config::word_of(plan.config.float8.recipe),
      plan.job.microbatches,
      plan.job.microbatches == 1 ? "" : "es",
      training.local_batch_size,
      training.seq_len);
}

std::int64_t host_activation_nbytes(const plan::Job& job) {
  const std::vector<std::int64_t>& nbytes = job.plan_units.kept_nbytes;
  return std::accumulate(nbytes.begin(), nbytes.end(), std::int64_t{0});
}

std::string memory_text(const RunPlan& plan, const PlannedMachines& machines) {
  const plan::Estimate& e = plan.estimate;
  std::string text = "memory of one rank\n";
  for (const plan::RoleBytes& of : e.memory) {
    text += row(of.role, shown_gib(of.nbytes));
  }
  text += row("activations", shown_gib(e.step.activation_nbytes), "at most");
  if (plan.job.send_nbytes > 0) {
    text +=
        row("send of weights",
            shown_gib(plan.job.send_nbytes),
            "on rank 0, between two steps");
  }
  const double room = static_cast<double>(e.room_nbytes) / kGiB;
  text +=
      row("peak",
          shown_gib(e.peak_nbytes),
          e.fits() ? fmt::format(
                         "fits in {:.1f} GiB ({:.1f} less a reserve)",
                         room,
                         machines.gpu.memory_gib)
                   : fmt::format(
                         "does not fit in {:.1f} GiB: {} too much",
                         room,
                         shown_gib(e.peak_nbytes - e.room_nbytes)));
  if (plan.job.host_state_nbytes > 0) {
    text +=
        row("optimizer state",
            shown_gib(plan.job.host_state_nbytes),
            "in host memory");
  }
  if (const std::int64_t nbytes = host_activation_nbytes(plan.job);
      nbytes > 0) {
    text += row("activations", shown_gib(nbytes), "in host memory");
  }
  return text;
}

std::string step_text(const RunPlan& plan) {
  const plan::StepPlan& step = plan.estimate.step;
  std::string text = "a step\n";
  std::vector<std::pair<std::string, double>> kinds(
      step.kinds.begin(),
      step.kinds.end());
  std::ranges::sort(kinds, std::greater<>(), [](const auto& kind) {
    return kind.second;
  });
  double alone = 0;
  for (const auto& [kind, seconds] : kinds) {
    alone += seconds;
    if (seconds > 0) {
      text +=
          row(kind,
              ms(seconds),
              fmt::format("{:.1f} %", 100 * seconds / step.seconds));
    }
  }
  text +=
      row("contention",
          ms(std::max(0.0, step.compute_seconds - alone)),
          "transfers and other streams slow the computation");
  text += row("exposed transfers", ms(step.exposed_seconds));
  if (plan.job.tensor_ranks > 1 || plan.job.context_ranks > 1) {
    text +=
        row(plan.job.context_ranks == 1  ? "  tensor parallelism"
            : plan.job.tensor_ranks == 1 ? "  context parallelism"
                                         : "  TP and CP",
            ms(step.exposed_tensor_seconds),
            fmt::format(
                "{:.1f} %",
                100 * step.exposed_tensor_seconds / step.seconds));
  }
  for (const auto& [kind, seconds] : step.transfers) {
    text +=
        row("  " + kind,
            ms(seconds),
            kind.starts_with("TP ")
                ? "if nothing else ran; some of it overlaps with compute"
                : "if nothing else ran; most of it overlaps with compute");
  }
  text += row("host", ms(step.host_seconds), "to launch the step");
  text +=
      row("the step",
          ms(step.seconds),
          fmt::format("bound by {}", plan::to_string(plan.estimate.bound)));
  return text;
}

/// @param model  where the shape is: key=value.
Config config_of_model(
    const std::string& model,
    std::int64_t max_seq_len,
    const std::vector<std::string>& overrides) {
  const std::string text = fmt::format(
      "[data]\ntrain = \"random\"\n[training]\nseq_len = {}\n[precision]\n"
      "compute = \"bfloat16\"\nreduce = \"bfloat16\"\n",
      std::min(max_seq_len, kPresetTokens));
  std::vector<std::string> settings{model};
  settings.insert(settings.end(), overrides.begin(), overrides.end());
  return parse_config(text, model, settings);
}

std::string speed_text(
    const RunPlan& plan,
    const std::optional<double>& tokens) {
  const plan::Estimate& e = plan.estimate;
  std::string text = "speed\n";
  text +=
      row("tokens/s/GPU",
          with_commas(static_cast<std::int64_t>(e.tokens_per_second)));
  text += row("TFLOP/s/GPU", fmt::format("{:.1f}", e.tflops));
  text +=
      row("mfu",
          fmt::format("{:.1f} %", 100 * e.mfu),
          "as the trainer reports it: attention in full");
  text +=
      row("mfu, causal",
          fmt::format("{:.1f} %", 100 * e.causal_mfu),
          "only attention below the diagonal");
  if (tokens) {
    const double hours = plan::gpu_hours(e, *tokens);
    text +=
        row(plan::tokens_text(*tokens) + " tokens",
            amount_text(plan::days_of(plan.job, hours)) + " days",
            amount_text(hours) + " GPU-hours");
  }
  return text;
}

}  // namespace

Config config_of_preset(
    const std::string& preset,
    const std::vector<std::string>& overrides) {
  return config_of_model(
      "model.preset=" + preset,
      models::preset(preset).max_seq_len,
      overrides);
}

Config config_of_hf_config(
    const std::string& path,
    const std::vector<std::string>& overrides) {
  return config_of_model(
      "model.hf_config=" + path,
      models::from_hf_json(path).max_seq_len,
      overrides);
}

RunPlan plan_run(const Config& config, const PlannedMachines& machines) {
  RunPlan plan{
      .config =
          resolve_config(config, machines.ranks, machines.ranks_per_host)};
  check_priced(plan.config);
  plan.model = model_config(plan.config);
  plan.job = plan_job(plan.config, plan.model, machines.ranks, machines.host());
  plan.estimate = plan::estimate(plan.job, machines.gpu);
  return plan;
}

std::optional<double> planned_step_seconds(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t ranks,
    at::Device device) {
  const std::string_view table =
      device.is_cuda() ? plan::table_of_device(cuda_device_name(device))
                       : std::string_view();
  // A rank that sees only its own GPU cannot count the GPUs of its host.
  if (table.empty() || (ranks > 1 && num_cuda_devices() == 1)) {
    return std::nullopt;
  }
  try {
    check_priced(config);
    const PlannedMachines machines{
        .ranks = ranks,
        .ranks_per_host = num_cuda_devices(),
        .gpu = plan::find_gpu(std::string(table))};
    const plan::Job job = plan_job(config, model, ranks, machines.host());
    return plan::estimate(job, machines.gpu).step.seconds;
  } catch (const Error& error) {
    // A run that cannot be planned, such as FP8 without rates, still trains.
    log_debug("no plan of this run: {}", error.what());
    return std::nullopt;
  }
}

std::string picture_text(const RunPlan& plan) {
  const plan::StepPlan& step = plan.estimate.step;
  return fmt::format(
      "{}{}, a step of {}, of it {} exposed transfers; {} tokens/s/GPU, mfu "
      "{:.1f} %{}",
      strategy_name(plan.config.parallelism),
      sharing_text(plan.config.parallelism),
      ms(step.seconds),
      ms(step.exposed_seconds),
      with_commas(static_cast<std::int64_t>(plan.estimate.tokens_per_second)),
      100 * plan.estimate.mfu,
      step.shown_microbatches < plan.job.microbatches
          ? fmt::format(
                "; {} of {} microbatches are shown, {}",
                step.shown_microbatches,
                plan.job.microbatches,
                ms(step.shown_seconds))
          : "");
}

std::string to_string(
    const RunPlan& plan,
    const PlannedMachines& machines,
    const std::optional<double>& tokens) {
  return headline(plan, machines) + memory_text(plan, machines) +
         step_text(plan) + speed_text(plan, tokens) +
         fmt::format("prices: {}\n", machines.gpu.source);
}

std::string to_json(
    const RunPlan& plan,
    const PlannedMachines& machines,
    const std::optional<double>& tokens) {
  const plan::Estimate& e = plan.estimate;
  nlohmann::ordered_json json;
  json["gpu"] = machines.gpu.name;
  json["prices"] = machines.gpu.source;
  json["ranks"] = machines.ranks;
  json["ranks_per_host"] = machines.ranks_per_host;
  json["parameters"] = models::num_parameters(plan.model);
  json["strategy"] = strategy_name(plan.config.parallelism);
  json["tensor_parallel_degree"] = plan.job.tensor_ranks;
  json["context_parallel_degree"] = plan.job.context_ranks;
  json["microbatches"] = plan.job.microbatches;
  for (const plan::RoleBytes& of : e.memory) {
    json["memory_bytes"][of.role] = of.nbytes;
  }
  json["host_state_bytes"] = plan.job.host_state_nbytes;
  json["host_activation_bytes"] = host_activation_nbytes(plan.job);
  json["activation_bytes"] = e.step.activation_nbytes;
  json["send_bytes"] = plan.job.send_nbytes;
  json["peak_bytes"] = e.peak_nbytes;
  json["room_bytes"] = e.room_nbytes;
  json["fits"] = e.fits();
  json["step_ms"] = 1e3 * e.step.seconds;
  json["compute_ms"] = 1e3 * e.step.compute_seconds;
  json["exposed_ms"] = 1e3 * e.step.exposed_seconds;
  json["exposed_tensor_parallel_ms"] = 1e3 * e.step.exposed_tensor_seconds;
  json["host_ms"] = 1e3 * e.step.host_seconds;
  for (const auto& [kind, seconds] : e.step.kinds) {
    json["kinds_ms"][kind] = 1e3 * seconds;
  }
  for (const auto& [kind, seconds] : e.step.transfers) {
    json["transfers_ms"][kind] = 1e3 * seconds;
  }
  json["bound"] = plan::to_string(e.bound);
  json["tokens_per_second_per_gpu"] = e.tokens_per_second;
  json["tflops_per_gpu"] = e.tflops;
  json["mfu"] = e.mfu;
  json["mfu_causal"] = e.causal_mfu;
  if (tokens) {
    const double hours = plan::gpu_hours(e, *tokens);
    json["tokens"] = *tokens;
    json["gpu_hours"] = hours;
    json["days"] = plan::days_of(plan.job, hours);
  }
  return json.dump(2) + "\n";
}

}  // namespace flatshard
