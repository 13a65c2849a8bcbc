#include "flatshard/train/metrics/metrics_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "flatshard/core/file_writer.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/diagnostics/step_profile.h"
#include "flatshard/runtime/graph_options.h"
#include "flatshard/train/metrics/host_operators.h"
#include "flatshard/train/metrics/metric_table.h"

namespace flatshard {
namespace {

using Json = nlohmann::ordered_json;

/// Calls `see` with each line of a file and the parsed object of the line.
void for_each_row(
    const std::filesystem::path& path,
    const std::function<void(const std::string&, const Json&)>& see) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    see(line, Json::parse(line, nullptr, false));
  }
}

std::int64_t number_of(const Json& row, const char* key) {
  return row.is_object() && row.contains(key) && row[key].is_number_integer()
             ? row[key].get<std::int64_t>()
             : -1;
}

std::string utc_ms() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                      now.time_since_epoch())
                      .count() %
                  1000;
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  return fmt::format("{}.{:03}Z", text.data(), ms);
}

/// Returns the first fields of every row.
Json begin_row(std::int64_t step, int attempt) {
  Json row;
  row["step"] = step;
  row["time"] = utc_ms();
  row["attempt"] = attempt;
  return row;
}

template <class Values>
void add_metrics(
    Json& row,
    std::span<const Metric<Values>> metrics,
    const Values& values) {
  for (const Metric<Values>& metric : metrics) {
    const MetricValue value = metric.value(values);
    if (!value && !metric.null_if_unset) {
      continue;
    }
    const auto dot = metric.key.find('.');
    const std::string outer(metric.key.substr(0, dot));
    Json& field = dot == std::string_view::npos
                      ? row[outer]
                      : row[outer][std::string(metric.key.substr(dot + 1))];
    field = nullptr;
    if (value) {
      std::visit([&](auto number) { field = number; }, *value);
    }
  }
}

/// Replaces numbers that are not finite by null, since JSON has no words for
/// them. @return their texts at the places where they were; null: none.
Json take_nonfinite(Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double number = std::exchange(value, nullptr).get<double>();
    // The sign of NaN has no meaning.
    return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
  }
  Json texts;
  if (value.is_object()) {
    for (const auto& [key, member] : value.items()) {
      Json text = take_nonfinite(member);
      if (!text.is_null()) {
        texts[key] = std::move(text);
      }
    }
  }
  return texts;
}

/// Returns a row as a line. Names may contain bytes that are not UTF-8.
std::string to_line(Json row) {
  Json texts = take_nonfinite(row);
  if (!texts.is_null()) {
    row["not_finite"] = std::move(texts);
  }
  return row.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& path, Mode mode)
    : file_(path, mode) {
  if (mode == Mode::append) {
    std::int64_t last = 0;
    for_each_row(path, [&](const std::string&, const Json& row) {
      last = std::max({last, number_of(row, "attempt"), std::int64_t{0}});
    });
    attempt_ = static_cast<int>(last) + 1;
  }
}

void MetricsFile::mark_overtaken(std::int64_t step) {
  std::string text;
  bool changed = false;
  for_each_row(file_.path(), [&](const std::string& line, const Json& row) {
    if (row.is_discarded()) {
      changed = true;  // half a line, of a machine that lost its power
      return;
    }
    const bool marks = number_of(row, "step") > step &&
                       !row.contains("overtaken") && line.ends_with('}');
    text +=
        marks ? line.substr(0, line.size() - 1) + ",\"overtaken\":true}" : line;
    text += '\n';
    changed = changed || marks;
  });
  if (changed) {
    write_file_atomic(file_.path(), text);
    file_.reopen();
  }
}

bool metrics_say_ended(const std::filesystem::path& path, std::int64_t step) {
  bool ended = false;
  for_each_row(path, [&](const std::string&, const Json& row) {
    ended = ended || (number_of(row, "step") == step && row.contains("ended") &&
                      !row.contains("overtaken"));
  });
  return ended;
}

void MetricsFile::write_ended(std::int64_t step) {
  auto row = begin_row(step, attempt_);
  row["ended"] = true;
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_start(const StartMetrics& metrics) {
  auto row = begin_row(metrics.done, attempt_);
  auto& start = row["start"];
  start["steps"] = metrics.steps;
  start["ranks"] = metrics.ranks;
  start["device"] = metrics.device;
  start["parameters"] = metrics.parameters;
  start["tokens_per_step"] = metrics.tokens_per_step;
  auto& datasets = start["data"] = Json::array();
  for (const DataEpochs& data : metrics.data) {
    datasets.push_back(
        {{"path", data.path},
         {"samples", data.samples},
         {"steps_per_epoch", data.steps},
         {"epochs", data.epochs}});
  }
  start["changed_keys"] = metrics.changed_keys;
  auto& environment = start["environment"] = Json::object();
  for (const auto& [name, text] : metrics.environment) {
    environment[name] = text;
  }
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_checkpoint(std::int64_t step, double seconds) {
  auto row = begin_row(step, attempt_);
  row["checkpoint_s"] = seconds;
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_checkpoint_error(
    std::int64_t step,
    const std::string& error) {
  auto row = begin_row(step, attempt_);
  row["checkpoint_error"] = error;
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_weights(
    std::int64_t step,
    double seconds,
    std::int64_t nbytes) {
  auto row = begin_row(step, attempt_);
  row["weights_s"] = seconds;
  row["weights_nbytes"] = nbytes;
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_weights_error(
    std::int64_t step,
    const std::string& error,
    std::int64_t failures) {
  auto row = begin_row(step, attempt_);
  row["weights_error"] = error;
  row["weights_failures"] = failures;
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_profile(std::int64_t step, const StepProfile& profile) {
  auto row = begin_row(step, attempt_);
  auto& parts = row["profile"];
  parts["span_ms"] = profile.span_ms;
  parts["compute_ms"] = profile.compute_ms;
  parts["exposed_ms"] = profile.exposed_ms;
  parts["idle_ms"] = profile.idle_ms;
  auto& classes = parts["classes_ms"] = Json::object();
  for (const KernelClass& kernels : profile.classes) {
    classes[kernels.name] = kernels.ms;
  }
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_profile(
    std::int64_t step,
    const std::vector<HostOperator>& operators) {
  constexpr std::size_t kMostNamed = 12;
  constexpr double kNsPerMs = 1e6;
  auto row = begin_row(step, attempt_);
  auto& parts = row["profile"]["operators_ms"] = Json::object();
  double other_ms = 0;
  for (std::size_t i = 0; i < operators.size(); ++i) {
    const double ms = static_cast<double>(operators[i].own_ns) / kNsPerMs;
    if (i < kMostNamed) {
      parts[operators[i].name] = ms;
    } else {
      other_ms += ms;
    }
  }
  parts["other"] = other_ms;
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_graphs(std::int64_t step, const GraphStats& stats) {
  auto row = begin_row(step, attempt_);
  auto& graphs = row["cuda_graph"];
  graphs["captures"] = stats.captures;
  graphs["forward_replays"] = stats.forward_replays;
  graphs["backward_replays"] = stats.backward_replays;
  graphs["step_replays"] = stats.step_replays;
  graphs["nbytes"] = stats.nbytes;
  graphs["fallbacks"] = stats.fallbacks;
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write(const StepMetrics& metrics) {
  auto row = begin_row(metrics.step, attempt_);
  add_metrics(row, step_metrics(), metrics);
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_validation(const ValidationMetrics& metrics) {
  auto row = begin_row(metrics.step, attempt_);
  add_metrics(row, validation_metrics(), metrics);
  for (const auto& [folder, loss] : metrics.parts) {
    row["validation_losses"][folder] = loss;
  }
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_nonfinite(
    std::int64_t step,
    const std::string& what,
    std::optional<std::int64_t> goes_on_after) {
  auto row = begin_row(step, attempt_);
  row["nonfinite"] = what;
  if (goes_on_after) {
    row["goes_on_after"] = *goes_on_after;
  }
  file_.append(to_line(std::move(row)));
}

void MetricsFile::write_norms(
    std::int64_t step,
    const std::vector<ParameterNorm>& norms) {
  auto weights = Json::object();
  auto grads = Json::object();
  for (const ParameterNorm& norm : norms) {
    weights[norm.name] = norm.weight;
    if (norm.grad) {
      grads[norm.name] = *norm.grad;
    }
  }
  auto row = begin_row(step, attempt_);
  row["weight_norms"] = std::move(weights);
  row["grad_norms"] = std::move(grads);
  file_.append(to_line(std::move(row)));
}

}  // namespace flatshard
