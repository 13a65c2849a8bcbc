#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/models/config.h"
#include "flatshard/train/config/run_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>

namespace flatshard {
namespace {

// Appends "[section]" where the key is of another one than the key before.
void begin_section(
    std::string& text,
    std::string_view& section,
    const ConfigKey& key) {
  if (key.section() != section) {
    text += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", key.section());
    section = key.section();
  }
}

// Keys that nearly every run sets.
constexpr std::array<std::string_view, 6> kOftenSet{
    "run.output_dir",
    "training.steps",
    "training.seq_len",
    "training.local_batch_size",
    "optimizer.lr",
    "parallelism.strategy"};

// Returns lines of at most 80 characters that TOML skips.
std::string as_comment(std::string_view text) {
  constexpr std::size_t kWidth = 78;
  std::string comment;
  std::size_t column = kWidth;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    if (column + 1 + end > kWidth) {
      comment += comment.empty() ? "#" : "\n#";
      column = 1;
    }
    comment += fmt::format(" {}", text.substr(0, end));
    column += 1 + end;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return comment + "\n";
}

}  // namespace

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

std::vector<std::string> changed_keys(const Config& config) {
  Config copy = config;
  Config defaults;
  std::vector<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    if (config::value_text(key.field(copy)) !=
        config::value_text(key.field(defaults))) {
      names.emplace_back(key.full_name);
    }
  }
  return names;
}

std::string to_toml(const Config& config) {
  Config copy = config;
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    begin_section(text, section, key);
    const std::string value = config::value_text(key.field(copy));
    text += value.empty() ? fmt::format("# {} is unset\n", key.name())
                          : fmt::format("{} = {}\n", key.name(), value);
  }
  return text;
}

std::string to_commented_toml(const Config& config) {
  Config copy = config;
  Config defaults;
  std::string text;
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    begin_section(text, section, key);
    const ConfigField field = key.field(copy);
    const std::string value = config::value_text(field);
    text += as_comment(key.help);
    if (const auto words = key.words(); !words.empty()) {
      text += as_comment(fmt::format("One of: {}", fmt::join(words, ", ")));
    }
    if (value.empty()) {
      text +=
          fmt::format("# {} = <{}>\n", key.name(), config::type_name(field));
    } else {
      const bool is_shown = value != config::value_text(key.field(defaults)) ||
                            std::ranges::count(kOftenSet, key.full_name) > 0;
      text +=
          fmt::format("{}{} = {}\n", is_shown ? "" : "# ", key.name(), value);
    }
  }
  return text;
}

Config starting_config(const std::string& preset) {
  models::preset(preset);  // throws for another name
  Config config;
  config.model.preset = preset;
  config.data.train = {{.path = "corpora/texts"}};
  config.data.validation = {{.path = "corpora/texts"}};
  config.training.steps = 1000;
  config.training.seq_len = 4096;
  config.training.max_norm = 1.0;
  config.lr_scheduler.warmup_steps = 50;
  config.validation.freq = 100;
  config.checkpoint.interval = 200;
  config.checkpoint.keep_latest_k = 2;
  return config;
}

std::string describe_config() {
  Config defaults;
  std::string text =
      "A training config is a TOML file. Every key can also be given "
      "as\n--set section.key=value. It overrides the file.\n\n";
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    begin_section(text, section, key);
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
