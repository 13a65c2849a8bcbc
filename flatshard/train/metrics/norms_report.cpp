#include "flatshard/train/metrics/norms_report.h"

#include "flatshard/core/error.h"
#include "flatshard/diagnostics/norms.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

namespace flatshard {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN and no infinity: metrics.jsonl writes null for both.
double number(const Json& value) {
  return value.is_number() ? value.get<double>()
                           : std::numeric_limits<double>::quiet_NaN();
}

std::vector<ParameterNorm> norms_of(const Json& row) {
  std::vector<ParameterNorm> norms;
  const Json grads = row.value("grad_norms", Json::object());
  for (const auto& [name, weight] : row.at("weight_norms").items()) {
    ParameterNorm norm{.name = name, .weight = number(weight)};
    if (const auto grad = grads.find(name); grad != grads.end()) {
      norm.grad = number(*grad);
    }
    norms.push_back(std::move(norm));
  }
  return norms;
}

double sort_value(const ParameterNorm& norm, const std::string& sort) {
  const double grad = norm.grad.value_or(0.0);
  const double value = sort == "weight" ? norm.weight
                       : sort == "grad" ? grad
                                        : grad / norm.weight;
  // A value that is not a number comes first, since readers look for it.
  return std::isnan(value) ? std::numeric_limits<double>::infinity() : value;
}

}  // namespace

std::string norms_report(const NormsReportOptions& options) {
  const auto path = std::filesystem::path(options.run) / "metrics.jsonl";
  std::ifstream file(path);
  FLATSHARD_CHECK(
      file,
      io,
      "--run {}: cannot read {}; expected the output_dir of a run",
      options.run,
      path.string());
  std::optional<Json> found;
  std::string steps;
  std::int64_t line_number = 0;
  for (std::string line; std::getline(file, line);) {
    ++line_number;
    const Json row = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    FLATSHARD_CHECK(
        row.is_object() && row.contains("step") &&
            row["step"].is_number_integer(),
        format,
        "{}:{}: expected a JSON object with a step",
        path.string(),
        line_number);
    if (!row.contains("weight_norms") || !row["weight_norms"].is_object()) {
      continue;
    }
    const auto step = row["step"].get<std::int64_t>();
    steps += (steps.empty() ? "" : ", ") + std::to_string(step);
    if (options.step < 0 || step == options.step) {
      found = row;
    }
  }
  FLATSHARD_CHECK(
      !steps.empty(),
      usage,
      "{} has no norms; train with diagnostics.norms_freq above 0",
      path.string());
  FLATSHARD_CHECK(
      found,
      usage,
      "--step {}: {} has norms of the steps {}",
      options.step,
      path.string(),
      steps);
  auto norms = norms_of(*found);
  if (options.sort != "model") {
    std::stable_sort(norms.begin(), norms.end(), [&](auto& a, auto& b) {
      return sort_value(a, options.sort) > sort_value(b, options.sort);
    });
  }
  if (options.top > 0 && norms.size() > static_cast<std::size_t>(options.top)) {
    norms.resize(static_cast<std::size_t>(options.top));
  }
  return fmt::format(
      "step {}\n{}",
      (*found)["step"].get<std::int64_t>(),
      to_string(norms));
}

}  // namespace flatshard
