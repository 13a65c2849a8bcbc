#include "flatshard/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <set>
#include <string_view>

#include "flatshard/core/error.h"
#include "flatshard/core/escape_markup.h"
#include "flatshard/core/log.h"
#include "flatshard/report/page_template.h"
#include "flatshard/report/run.h"

namespace flatshard::report {
namespace {

namespace fs = std::filesystem;

// Enough for a pixel each, in a chart as wide as the page.
constexpr std::size_t kMostPoints = 1000;

const std::vector<std::string>& growing_columns() {
  static const std::vector<std::string> kNames{"attempt", "time", "tokens"};
  return kNames;
}

// Has the browser refuse whatever a page might ask for.
constexpr std::string_view kNothingElse =
    R"(<meta http-equiv="Content-Security-Policy" content="default-src 'none'; )"
    R"(style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">)"
    "\n";

/// JSON as a program reads it, or as a page shows it.
enum class Detail { all, drawn };

Json to_json(
    const std::map<std::string, Table::Column>& columns,
    Detail detail) {
  Json object = Json::object();
  for (const auto& [name, column] : columns) {
    Json& values = object[name] = Json::array();
    for (const double value : column) {
      if (!std::isfinite(value)) {
        values.push_back(nullptr);
      } else if (detail == Detail::all || value == std::floor(value)) {
        values.push_back(value);
      } else if (name == "time") {
        values.push_back(std::round(value * 10) / 10);
      } else {
        values.push_back(
            std::strtod(fmt::format("{:.6g}", value).c_str(), nullptr));
      }
    }
  }
  return object;
}

/// Returns the last value of each column, whatever is downsampled.
Json last_of(const Table& table) {
  Json last = Json::object();
  if (table.num_rows() > 0) {
    last["step"] = table.steps().back();
    for (const auto& [name, column] : table.columns()) {
      last[name] = std::isfinite(column.back()) ? Json(column.back()) : Json();
    }
  }
  return last;
}

Json to_json(const Table& table, Detail detail) {
  Json object;
  object["num_rows"] = table.num_rows();
  object["last"] = last_of(table);
  if (detail == Detail::all || table.num_rows() <= kMostPoints) {
    object["step"] = table.steps();
    object["columns"] = to_json(table.columns(), detail);
    return object;
  }
  Downsampled small = downsample(table, kMostPoints, growing_columns());
  object["step"] = small.steps;
  object["columns"] = to_json(small.mean, detail);
  for (const std::string& name : growing_columns()) {
    small.min.erase(name);
    small.max.erase(name);
  }
  object["min"] = to_json(small.min, detail);
  object["max"] = to_json(small.max, detail);
  return object;
}

/// Returns the keys that the run sets to another value than the default. A run
/// of an earlier version has no list of them, only their values.
Json changed_keys(const RunRecord& run, const Json& defaults) {
  if (!run.starts.empty()) {
    const Json& start = run.starts.back()["start"];
    if (const auto keys = start.find("changed_keys");
        keys != start.end() && keys->is_array()) {
      return *keys;
    }
  }
  Json keys = Json::array();
  for (const auto& [key, value] : run.config.items()) {
    const auto found = defaults.find(key);
    if (found == defaults.end() || *found != value) {
      keys.push_back(key);
    }
  }
  return keys;
}

Json to_json(const RunRecord& run, const Json& defaults, Detail detail) {
  Json object;
  object["name"] = run.name;
  object["folder"] = run.folder.string();
  object["ended"] = run.ended;
  object["last_time"] = run.last_time;
  object["training"] = to_json(run.training, detail);
  object["validation"] = to_json(run.validation, detail);
  object["starts"] = run.starts;
  object["checkpoints"] = run.checkpoints;
  object["checkpoint_errors"] = run.checkpoint_errors;
  object["nonfinite"] = run.nonfinite;
  object["profiles"] = run.profiles;
  object["config"] = run.config;
  object["changed"] = changed_keys(run, defaults);
  object["warnings"] = run.warnings;
  return object;
}

/// Returns the last `depth` parts of a path.
std::string end_of(const fs::path& path, std::ptrdiff_t depth) {
  fs::path end;
  const auto size = std::distance(path.begin(), path.end());
  for (auto part =
           std::next(path.begin(), std::max<std::ptrdiff_t>(size - depth, 0));
       part != path.end();
       ++part) {
    end /= *part;
  }
  return end.string();
}

/// Names runs by as much of their paths as distinguishes them. A folder that is
/// called "run", as by default, is not a name.
void name_runs(std::vector<RunRecord>& runs) {
  constexpr std::ptrdiff_t kMostParts = 6;
  for (std::ptrdiff_t depth = 1; depth <= kMostParts; ++depth) {
    std::set<std::string> names;
    for (RunRecord& run : runs) {
      std::error_code error;
      const fs::path path =
          fs::weakly_canonical(fs::absolute(run.folder), error);
      // A path that ends with a slash has an empty last part.
      run.name = end_of(path.has_filename() ? path : path.parent_path(), depth);
      names.insert(run.name);
    }
    if (names.size() == runs.size() && !names.contains("run")) {
      return;
    }
  }
}

Json build(const ReportOptions& options, Detail detail) {
  const Json defaults =
      flatten_toml(options.default_config, "the default config");
  std::vector<RunRecord> runs{read_run(options.run, "--run")};
  for (const std::string& other : options.compare) {
    runs.push_back(read_run(other, "--compare"));
  }
  name_runs(runs);
  Json object;
  object["format"] = "flatshard report";
  object["version"] = 1;
  object["made"] = std::chrono::duration<double>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  Json& list = object["runs"] = Json::array();
  for (const RunRecord& run : runs) {
    for (const std::string& warning : run.warnings) {
      log_warning("{}", warning);
    }
    list.push_back(to_json(run, defaults, detail));
  }
  return object;
}

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Escapes JSON for a script element: without `<` nothing can close it.
std::string for_script(std::string json) {
  std::string text;
  text.reserve(json.size());
  for (const char c : json) {
    text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  }
  return text;
}

void replace(std::string& page, std::string_view mark, const std::string& by) {
  const std::size_t at = page.find(mark);
  FLATSHARD_CHECK(
      at != std::string::npos,
      internal,
      "the page's template has no {}",
      mark);
  page.replace(at, mark.size(), by);
}

}  // namespace

std::string report_json(const ReportOptions& options) {
  return dump(build(options, Detail::all));
}

std::string report_page(const ReportOptions& options) {
  Json data = build(options, Detail::drawn);
  data["charts"] = Json::parse(options.charts);
  std::string page = kPageHtml;
  // Starts from the end, so that inserted text is not searched.
  replace(
      page,
      R"(<script src="page.js"></script>)",
      fmt::format("<script>\n{}</script>", kPageScript));
  replace(page, "{}", for_script(dump(data)));
  replace(
      page,
      R"(<link rel="stylesheet" href="page.css">)",
      fmt::format("{}<style>\n{}</style>", kNothingElse, kPageStyle));
  replace(
      page,
      "<title>Flatshard report</title>",
      fmt::format(
          "<title>{} - Flatshard report</title>",
          escape_markup(
              data["runs"][0]["name"].get_ref<const std::string&>())));
  return page;
}

}  // namespace flatshard::report
