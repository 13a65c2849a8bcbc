#include "flatshard/report/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string_view>

#include "flatshard/core/error.h"
#include "flatshard/core/toml.h"

namespace flatshard::report {
namespace {

namespace fs = std::filesystem;

/// Collects the numbers of a row, with the numbers of objects as
/// "experts.load".
void collect_numbers(
    const Json& object,
    const std::string& prefix,
    Table::Row& numbers) {
  constexpr std::array<std::string_view, 3> kNoMeasurements{
      "step",
      "overtaken",
      "not_finite"};
  for (const auto& [key, value] : object.items()) {
    const bool skipped =
        prefix.empty() &&
        std::find(kNoMeasurements.begin(), kNoMeasurements.end(), key) !=
            kNoMeasurements.end();
    if (skipped) {
      continue;
    }
    if (value.is_object()) {
      collect_numbers(value, prefix + key + ".", numbers);
    } else if (value.is_number()) {
      numbers[prefix + key] = value.get<double>();
    } else if (value.is_null()) {
      numbers[prefix + key] = std::nan("");
    }
  }
}

double time_of(const Json& row) {
  const auto time = row.find("time");
  return time != row.end() && time->is_string()
             ? seconds_of(time->get<std::string>())
             : 0;
}

Table::Row numbers_of(const Json& row) {
  Table::Row numbers;
  collect_numbers(row, "", numbers);
  numbers["time"] = time_of(row);
  return numbers;
}

/// Returns a row of a kind that is shown as it is, with its time in seconds.
Json event_of(const Json& row) {
  Json event = row;
  event["time"] = time_of(row);
  return event;
}

bool is_row(const Json& row) {
  return row.is_object() && row.contains("step") &&
         row["step"].is_number_integer();
}

void add_row(RunRecord& run, const Json& row) {
  ++run.rows;
  run.last_time = std::max(run.last_time, time_of(row));
  if (row.contains("start") && row["start"].is_object()) {
    run.starts.push_back(event_of(row));
    run.ended = false;
    return;
  }
  if (row.contains("nonfinite") && row["nonfinite"].is_string()) {
    run.nonfinite.push_back(event_of(row));
    return;
  }
  if (row.contains("overtaken")) {
    return;
  }
  const auto step = row["step"].get<std::int64_t>();
  if (row.contains("loss")) {
    run.training.append(step, numbers_of(row));
  } else if (row.contains("validation_loss")) {
    run.validation.append(step, numbers_of(row));
  } else if (row.contains("checkpoint_s") && row["checkpoint_s"].is_number()) {
    run.checkpoints.push_back(event_of(row));
  } else if (row.contains("checkpoint_error")) {
    run.checkpoint_errors.push_back(event_of(row));
  } else if (row.contains("profile") && row["profile"].is_object()) {
    run.profiles.push_back(event_of(row));
  } else if (row.contains("ended")) {
    run.ended = true;
  }
}

Json to_json(const toml::node& node) {
  if (const auto* text = node.as_string()) {
    return text->get();
  }
  if (const auto* number = node.as_integer()) {
    return number->get();
  }
  if (const auto* number = node.as_floating_point()) {
    return number->get();
  }
  if (const auto* truth = node.as_boolean()) {
    return truth->get();
  }
  if (const auto* array = node.as_array()) {
    Json values = Json::array();
    for (const toml::node& value : *array) {
      values.push_back(to_json(value));
    }
    return values;
  }
  Json values = Json::object();
  if (const auto* table = node.as_table()) {
    for (const auto& [key, value] : *table) {
      values[std::string(key.str())] = to_json(value);
    }
  }
  return values;
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

}  // namespace

double seconds_of(const std::string& time) {
  std::tm parts{};
  const char* rest = ::strptime(time.c_str(), "%Y-%m-%dT%H:%M:%S", &parts);
  if (rest == nullptr) {
    return 0;
  }
  const double fraction = *rest == '.' ? std::strtod(rest, nullptr) : 0;
  return static_cast<double>(::timegm(&parts)) + fraction;
}

Json flatten_toml(const std::string& text, const std::string& origin) {
  Json values = Json::object();
  try {
    const toml::table sections = toml::parse(text, origin);
    for (const auto& [section, keys] : sections) {
      if (const auto* table = keys.as_table()) {
        for (const auto& [key, value] : *table) {
          values[fmt::format("{}.{}", section.str(), key.str())] =
              to_json(value);
        }
      }
    }
  } catch (const toml::parse_error& error) {
    FLATSHARD_THROW(
        format,
        "{}:{}: {}",
        origin,
        error.source().begin.line,
        error.description());
  } catch (const TomlAssertion&) {
    FLATSHARD_THROW(format, "{}: is not TOML", origin);
  }
  return values;
}

RunRecord read_run(const fs::path& folder, const std::string& option) {
  std::error_code error;
  const fs::path path = folder / "metrics.jsonl";
  std::ifstream file(path);
  FLATSHARD_CHECK(
      file,
      io,
      "{} {}: {}; expected the output_dir of a run",
      option,
      folder.string(),
      fs::is_directory(folder, error) ? "it has no metrics.jsonl"
                                      : "the directory does not exist");
  RunRecord run{.folder = folder};
  std::int64_t line_number = 0;
  for (std::string line; std::getline(file, line);) {
    ++line_number;
    const Json row = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (is_row(row)) {
      add_row(run, row);
    } else {
      run.warnings.push_back(fmt::format(
          "{}:{}: skipped, because it is not a JSON object with a step",
          path.string(),
          line_number));
    }
  }
  FLATSHARD_CHECK(
      run.rows > 0,
      format,
      "{} {}: {} has no row of a run",
      option,
      folder.string(),
      path.string());
  const fs::path config = folder / "config.toml";
  run.config = Json::object();
  if (!fs::exists(config, error)) {
    run.warnings.push_back(
        fmt::format("{}: the file does not exist", config.string()));
    return run;
  }
  try {
    run.config = flatten_toml(text_of(config), config.string());
  } catch (const Error& damaged) {
    run.warnings.push_back(damaged.message());
  }
  return run;
}

}  // namespace flatshard::report
