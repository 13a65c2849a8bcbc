#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/plan/sweep.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <ranges>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

constexpr std::size_t kMostShown = 16;

std::string strategy_text(const RunChoice& choice, std::int64_t ranks) {
  std::string text = choice.strategy;
  if (choice.replicas > 1) {
    text += fmt::format(
        " {}x{}",
        choice.replicas,
        ranks / choice.replicas / choice.tensor_degree);
  }
  if (choice.tensor_degree > 1) {
    text += fmt::format(" tp{}", choice.tensor_degree);
  }
  if (!choice.reshard_after_forward) {
    text += " kept";
  }
  if (choice.expert_degree > 1) {
    text += fmt::format(" ep{}", choice.expert_degree);
  }
  if (choice.expert_tensor_degree > 1) {
    text += fmt::format(" etp{}", choice.expert_tensor_degree);
  }
  text += choice.overlap ? " overlap" : "";
  return text;
}

/// E.g. "full", or "full:8" of the first 8 blocks.
std::string recompute_text(const RunChoice& choice) {
  const std::string mode(config::word_of(choice.recompute));
  return choice.recomputed_layers
             ? fmt::format("{}:{}", mode, *choice.recomputed_layers)
             : mode;
}

std::string row_of(const PlannedChoice& planned, std::int64_t ranks) {
  const RunChoice& choice = planned.choice;
  return fmt::format(
      "{:<33} {:<10} {:>5} {:<10} {:<8}",
      strategy_text(choice, ranks),
      recompute_text(choice),
      choice.local_batch_size,
      config::word_of(choice.float8),
      config::word_of(choice.state_dtype));
}

/// The words of the column of strategies.
constexpr std::string_view kWords =
    "AxB      A groups of B ranks; each group shards the full model\ntpN      "
    "N ranks share each layer (tensor parallelism)\nkept     weights stay "
    "unsharded between forward and backward\nepN      N ranks divide the "
    "experts (expert parallelism)\netpN     N ranks share the width of each "
    "expert\noverlap  two microbatches in flight\nbatch    sequences per "
    "microbatch, shared by the ranks of tp\nstates   optimizer.state_dtype\n";

constexpr std::string_view kHeader =
    "strategy                          recompute  batch FP8        states  ";

/// Returns the errors, the most frequent first.
std::vector<std::pair<std::string, std::int64_t>> sorted_refusals(
    const Sweep& sweep) {
  std::vector<std::pair<std::string, std::int64_t>> sorted(
      sweep.refusals.begin(),
      sweep.refusals.end());
  std::ranges::stable_sort(
      sorted,
      std::greater<>(),
      &std::pair<std::string, std::int64_t>::second);
  return sorted;
}

std::string refusals_text(const Sweep& sweep) {
  constexpr std::size_t kMostErrors = 6;
  std::string text;
  std::int64_t others = sweep.num_refused();
  for (const auto& [error, count] :
       sorted_refusals(sweep) | std::views::take(kMostErrors)) {
    text += fmt::format("{:>5}  {}\n", count, error);
    others -= count;
  }
  if (others > 0) {
    text += fmt::format("{:>5}  with other errors\n", others);
  }
  return text.empty() ? text : "\nwhat the trainer refuses\n" + text;
}

}  // namespace

std::int64_t Sweep::num_refused() const {
  std::int64_t sum = 0;
  for (const auto& [error, count] : refusals) {
    sum += count;
  }
  return sum;
}

std::string to_string(const Sweep& sweep, const PlannedMachines& machines) {
  std::string text = fmt::format(
      "{} ways fit on {} ranks of {}, {} do not, {} the trainer refuses\n",
      sweep.fitting.size(),
      with_commas(machines.ranks),
      machines.gpu.name,
      sweep.too_large.size(),
      sweep.num_refused());
  if (!sweep.fitting.empty()) {
    text += fmt::format(
        "\n{} {:>12} {:>6} {:>8} {:>9} {:>9}  {}\n",
        kHeader,
        "tokens/s/GPU",
        "mfu",
        "GiB",
        "step",
        "exposed",
        "bound by");
  }
  for (std::size_t i = 0; i < std::min(kMostShown, sweep.fitting.size()); ++i) {
    const PlannedChoice& planned = sweep.fitting[i];
    const plan::Estimate& e = planned.estimate;
    text += fmt::format(
        "{} {:>12} {:>5.1f}% {:>8.1f} {:>6.0f} ms {:>6.0f} ms  {}\n",
        row_of(planned, machines.ranks),
        with_commas(static_cast<std::int64_t>(e.tokens_per_second)),
        100 * e.mfu,
        static_cast<double>(e.peak_nbytes) / kGiB,
        1e3 * e.step.seconds,
        1e3 * e.step.exposed_seconds,
        plan::to_string(e.bound));
  }
  if (!sweep.too_large.empty()) {
    text += fmt::format(
        "\nwhat does not fit in {:.1f} GiB, the smallest first\n{} {:>8} "
        "{:>9}\n",
        static_cast<double>(sweep.too_large.front().estimate.room_nbytes) /
            kGiB,
        kHeader,
        "GiB",
        "too much");
  }
  constexpr std::size_t kMostTooLarge = 8;
  for (std::size_t i = 0; i < std::min(kMostTooLarge, sweep.too_large.size());
       ++i) {
    const PlannedChoice& planned = sweep.too_large[i];
    const plan::Estimate& e = planned.estimate;
    text += fmt::format(
        "{} {:>8.1f} {:>9.1f}\n",
        row_of(planned, machines.ranks),
        static_cast<double>(e.peak_nbytes) / kGiB,
        static_cast<double>(e.peak_nbytes - e.room_nbytes) / kGiB);
  }
  text += refusals_text(sweep);
  return text + fmt::format("\n{}prices: {}\n", kWords, machines.gpu.source);
}

std::string to_json(const Sweep& sweep, const PlannedMachines& machines) {
  nlohmann::ordered_json json;
  json["gpu"] = machines.gpu.name;
  json["prices"] = machines.gpu.source;
  json["ranks"] = machines.ranks;
  json["refused"] = sweep.num_refused();
  json["refusals"] = nlohmann::json::array();
  for (const auto& [error, count] : sorted_refusals(sweep)) {
    json["refusals"].push_back({{"error", error}, {"count", count}});
  }
  const auto entry = [&](const PlannedChoice& planned) {
    const RunChoice& choice = planned.choice;
    const plan::Estimate& e = planned.estimate;
    nlohmann::ordered_json of;
    of["strategy"] = choice.strategy;
    of["replicas"] = choice.replicas;
    of["tensor_parallel_degree"] = choice.tensor_degree;
    of["reshard_after_forward"] = choice.reshard_after_forward;
    of["recompute"] = config::word_of(choice.recompute);
    if (choice.recomputed_layers) {
      of["recomputed_layers"] = *choice.recomputed_layers;
    }
    of["local_batch_size"] = choice.local_batch_size;
    of["expert_degree"] = choice.expert_degree;
    of["expert_tensor_degree"] = choice.expert_tensor_degree;
    of["overlap"] = choice.overlap;
    of["float8"] = config::word_of(choice.float8);
    of["state_dtype"] = config::word_of(choice.state_dtype);
    of["tokens_per_step"] = planned.tokens_per_step;
    of["peak_bytes"] = e.peak_nbytes;
    of["room_bytes"] = e.room_nbytes;
    if (e.fits()) {
      of["tokens_per_second_per_gpu"] = e.tokens_per_second;
      of["mfu"] = e.mfu;
      of["mfu_causal"] = e.causal_mfu;
      of["step_ms"] = 1e3 * e.step.seconds;
      of["exposed_ms"] = 1e3 * e.step.exposed_seconds;
      of["exposed_tensor_parallel_ms"] = 1e3 * e.step.exposed_tensor_seconds;
      of["bound"] = plan::to_string(e.bound);
    }
    return of;
  };
  json["fitting"] = nlohmann::json::array();
  for (const PlannedChoice& planned : sweep.fitting) {
    json["fitting"].push_back(entry(planned));
  }
  json["too_large"] = nlohmann::json::array();
  for (const PlannedChoice& planned : sweep.too_large) {
    json["too_large"].push_back(entry(planned));
  }
  return json.dump(2) + "\n";
}

}  // namespace flatshard
