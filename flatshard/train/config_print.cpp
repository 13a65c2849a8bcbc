#include <algorithm>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/train/config.h"
#include "flatshard/train/config_check.h"
#include "flatshard/train/config_field.h"

namespace flatshard {
namespace {

/// A number as TOML that reads back to the same double.
std::string number_text(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) {
    text += ".0";
  }
  return text;
}

std::string bool_text(bool value) {
  return value ? "true" : "false";
}

/// A TOML basic string.
std::string quoted_text(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      text.push_back('\\');
      text.push_back(c);
    } else if (code < 0x20 || code == 0x7F) {
      text += fmt::format("\\u{:04X}", code);
    } else {
      text.push_back(c);
    }
  }
  return text + "\"";
}

/// One folder as text, several as an array of tables, each on a line.
std::string sources_text(const std::vector<data::SourceChoice>& sources) {
  if (sources.size() <= 1) {
    return quoted_text(sources.empty() ? std::string() : sources[0].path);
  }
  std::string text = "[";
  for (const data::SourceChoice& source : sources) {
    text += fmt::format(
        "\n  {{ path = {}, weight = {} }},",
        quoted_text(source.path),
        number_text(source.weight));
  }
  return text + "\n]";
}

}  // namespace

std::string_view type_name(const ConfigField& field) {
  return std::visit(
      Overloaded{
          [](std::string*) { return "text in quotes"; },
          [](std::vector<data::SourceChoice>*) {
            return "a folder in quotes, or a list of { path = \"folder\", "
                   "weight = number }";
          },
          [](std::int64_t*) { return "an integer"; },
          [](double*) { return "a number"; },
          [](bool*) { return "true or false"; },
          [](std::optional<std::int64_t>*) { return "an integer"; },
          [](std::optional<double>*) { return "a number"; },
          [](std::optional<bool>*) { return "true or false"; }},
      field);
}

std::string value_text(const ConfigField& field) {
  return std::visit(
      Overloaded{
          [](std::string* value) { return quoted_text(*value); },
          [](std::vector<data::SourceChoice>* value) {
            return sources_text(*value);
          },
          [](std::int64_t* value) { return fmt::format("{}", *value); },
          [](double* value) { return number_text(*value); },
          [](bool* value) { return bool_text(*value); },
          [](std::optional<std::int64_t>* value) {
            return *value ? fmt::format("{}", **value) : std::string();
          },
          [](std::optional<double>* value) {
            return *value ? number_text(**value) : std::string();
          },
          [](std::optional<bool>* value) {
            return *value ? bool_text(**value) : std::string();
          }},
      field);
}

bool differs_from_default(const Config& config, const ConfigKey& key) {
  Config copy = config;
  Config defaults;
  return value_text(key.field(copy)) != value_text(key.field(defaults));
}

void set_to_default(Config& config, const ConfigKey& key) {
  Config defaults;
  std::visit(
      [&](auto* value) {
        *value = *std::get<decltype(value)>(key.field(defaults));
      },
      key.field(config));
}

std::string differing_keys(const Config& config, const Config& base) {
  Config copy = config;
  Config other = base;
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    const std::string value = value_text(key.field(copy));
    if (value == value_text(key.field(other))) {
      continue;
    }
    if (key.section != section) {
      text +=
          fmt::format("{}  [{}] ", section.empty() ? "" : "\n", key.section);
      section = key.section;
    } else {
      text += ", ";
    }
    text += fmt::format("{} = {}", key.name, value.empty() ? "unset" : value);
  }
  return text;
}

std::string to_toml(const Config& config) {
  Config copy = config;
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != section) {
      text += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", key.section);
      section = key.section;
    }
    const std::string value = value_text(key.field(copy));
    text += value.empty() ? fmt::format("# {} is unset\n", key.name)
                          : fmt::format("{} = {}\n", key.name, value);
  }
  return text;
}

std::filesystem::path save_config(const Config& config) {
  const std::filesystem::path folder = config.run.output_dir;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  FLATSHARD_CHECK(
      !error,
      io,
      "cannot make run.output_dir {}: {}",
      folder.string(),
      error.message());
  write_file_atomic(folder / "config.toml", to_toml(config));
  return folder / "config.toml";
}

std::string describe_config() {
  Config defaults;
  std::string text =
      "A training config is a TOML file. Every key may also be given as\n"
      "--set section.key=value, which wins over the file.\n";
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != section) {
      text += fmt::format("\n[{}]\n", key.section);
      section = key.section;
    }
    const ConfigField field = key.field(defaults);
    const std::string value = value_text(field);
    text += fmt::format(
        "{} = {}\n    {}\n",
        key.name,
        value.empty() ? fmt::format("<unset, {}>", type_name(field)) : value,
        key.help);
    if (!key.choices.empty()) {
      std::string choices(key.choices);
      for (auto at = choices.find('|'); at != std::string::npos;
           at = choices.find('|', at + 2)) {
        choices.replace(at, 1, ", ");
      }
      text += fmt::format("    one of: {}\n", choices);
    }
  }
  return text;
}

}  // namespace flatshard
