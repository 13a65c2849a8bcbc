#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/train/config.h"

#include <fmt/ranges.h>

namespace flatshard {

std::string differing_keys(const Config& config, const Config& base) {
  Config copy = config;
  Config other = base;
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    const std::string value = config::value_text(key.field(copy));
    if (value == config::value_text(key.field(other))) {
      continue;
    }
    if (key.section() != section) {
      text +=
          fmt::format("{}  [{}] ", section.empty() ? "" : "\n", key.section());
      section = key.section();
    } else {
      text += ", ";
    }
    text += fmt::format("{} = {}", key.name(), value.empty() ? "unset" : value);
  }
  return text;
}

std::string to_toml(const Config& config) {
  Config copy = config;
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section() != section) {
      text +=
          fmt::format("{}[{}]\n", section.empty() ? "" : "\n", key.section());
      section = key.section();
    }
    const std::string value = config::value_text(key.field(copy));
    text += value.empty() ? fmt::format("# {} is unset\n", key.name())
                          : fmt::format("{} = {}\n", key.name(), value);
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
    if (key.section() != section) {
      text += fmt::format("\n[{}]\n", key.section());
      section = key.section();
    }
    const ConfigField field = key.field(defaults);
    const std::string value = config::value_text(field);
    text += fmt::format(
        "{} = {}\n    {}\n",
        key.name(),
        value.empty() ? fmt::format("<unset, {}>", config::type_name(field))
                      : value,
        key.help);
    if (const auto words = key.words(); !words.empty()) {
      text += fmt::format("    one of: {}\n", fmt::join(words, ", "));
    }
  }
  return text;
}

}  // namespace flatshard
