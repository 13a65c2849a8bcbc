#include "flatshard/plan/estimate.h"

#include "flatshard/core/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <utility>

namespace flatshard::plan {
namespace {

constexpr double kGibBytes = 1024.0 * 1024.0 * 1024.0;
/// Fraction of a step from which waiting for transfers counts as its bound.
constexpr double kExposedShare = 0.1;

Bound bound_of(const Estimate& estimate) {
  const StepPlan& step = estimate.step;
  if (!estimate.fits()) {
    return Bound::memory;
  }
  if (step.host_seconds > step.device_seconds) {
    return Bound::host;
  }
  if (step.exposed_seconds > kExposedShare * step.device_seconds) {
    return Bound::transfers;
  }
  double passes = 0;
  double products = 0;
  for (const auto& [kind, seconds] : step.kinds) {
    const bool is_product =
        kind == "GEMM" || kind == "attention" || kind == "Newton-Schulz";
    (is_product ? products : passes) += seconds;
  }
  return products >= passes ? Bound::compute : Bound::memory_bandwidth;
}

/// Returns the memory table of a job. Gradients are allocated and freed with
/// the activations, so they are not part of the sum.
Estimate
table_of(const Job& job, const std::vector<UnitPlan>& units, const Gpu& gpu) {
  Estimate estimate{
      .memory = memory_of(job, units),
      .room_nbytes = static_cast<std::int64_t>(
          (1 - kReserve) * gpu.memory_gib * kGibBytes),
      .bound = Bound::memory};
  for (const RoleBytes& row : estimate.memory) {
    estimate.peak_nbytes += row.role == "gradients" ? 0 : row.nbytes;
  }
  return estimate;
}

Estimate price(
    const Job& job,
    const std::vector<UnitPlan>& units,
    Estimate estimate,
    const Gpu& gpu) {
  constexpr double kTeraFlops = 1e12;
  estimate.step = plan_step(job, units, gpu);
  for (const RoleBytes& row : estimate.memory) {
    if (row.role == "slot pool") {
      estimate.peak_nbytes +=
          std::max<std::int64_t>(0, estimate.step.slot_nbytes - row.nbytes);
    }
  }
  // Between two steps activations and gradients are freed.
  estimate.peak_nbytes += std::max(estimate.step.peak_nbytes, job.send_nbytes);
  estimate.tokens_per_second = job.tokens_per_rank / estimate.step.seconds;
  estimate.tflops =
      estimate.tokens_per_second * job.flops_per_token / kTeraFlops;
  estimate.mfu = estimate.tflops / gpu.peak_bf16_tflops;
  estimate.causal_mfu =
      estimate.mfu * job.causal_flops_per_token / job.flops_per_token;
  estimate.bound = bound_of(estimate);
  return estimate;
}

}  // namespace

std::string_view to_string(Bound bound) {
  switch (bound) {
    case Bound::memory:
      return "memory";
    case Bound::compute:
      return "compute";
    case Bound::memory_bandwidth:
      return "memory bandwidth";
    case Bound::transfers:
      return "transfers";
    case Bound::host:
      return "host";
  }
  return "unknown";
}

Estimate estimate(const Job& job, const Gpu& gpu) {
  const std::vector<UnitPlan> units = plan_units(job);
  return price(job, units, table_of(job, units, gpu), gpu);
}

Estimate estimate_if_table_fits(const Job& job, const Gpu& gpu) {
  const std::vector<UnitPlan> units = plan_units(job);
  Estimate table = table_of(job, units, gpu);
  return table.fits() ? price(job, units, std::move(table), gpu) : table;
}

double gpu_hours(const Estimate& estimate, double tokens) {
  constexpr double kHour = 3600;
  return tokens / estimate.tokens_per_second / kHour;
}

double days_of(const Job& job, double gpu_hours) {
  constexpr double kHoursPerDay = 24;
  return gpu_hours / static_cast<double>(job.ranks) / kHoursPerDay;
}

namespace {

/// Suffixes of a number of tokens, and their factors.
constexpr std::pair<std::string_view, double> kTokenUnits[] =
    {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"B", 1e9}, {"T", 1e12}};

}  // namespace

std::string tokens_text(double tokens) {
  const auto* unit = std::begin(kTokenUnits);
  for (const auto& larger : kTokenUnits) {
    unit = tokens >= larger.second ? &larger : unit;
  }
  return fmt::format("{:g}{}", tokens / unit->second, unit->first);
}

double parse_tokens(std::string_view text) {
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view suffix(
      end,
      static_cast<std::size_t>(text.data() + text.size() - end));
  double factor = 0;
  for (const auto& [name, of] : kTokenUnits) {
    factor = suffix == name ? of : factor;
  }
  FLATSHARD_CHECK(
      error == std::errc() && factor > 0 && value > 0 && std::isfinite(value),
      config,
      "--tokens expected a number such as 300B or 15T, got '{}'",
      text);
  return value * factor;
}

}  // namespace flatshard::plan
