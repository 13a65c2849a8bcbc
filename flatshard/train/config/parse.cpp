#include "flatshard/train/config/run_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "flatshard/core/error.h"
#include "flatshard/core/home_folder.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/core/toml.h"
#include "flatshard/train/config/find_key.h"
#include "flatshard/train/config/param_group_list.h"

namespace flatshard {
namespace {

std::string place(const std::string& origin, const toml::source_region& where) {
  return where.begin ? fmt::format(
                           "{}:{}:{}",
                           origin,
                           where.begin.line,
                           where.begin.column)
                     : origin;
}

std::string shown(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& value) { out << value; });
  return config::shortened(out.str());
}

/// "a/folder", or [{ path = "a/folder", weight = 2 }, ...]; unset when it is
/// neither.
std::optional<std::vector<data::SourceChoice>> read_sources(
    const ConfigKey& key,
    const toml::node& node,
    const std::string& where) {
  if (const auto path = node.value_exact<std::string>()) {
    return path->empty()
               ? std::vector<data::SourceChoice>{}
               : std::vector<data::SourceChoice>{{.path = expand_home(*path)}};
  }
  const toml::array* array = node.as_array();
  if (array == nullptr || array->empty()) {
    return std::nullopt;
  }
  std::vector<data::SourceChoice> sources;
  for (const toml::node& item : *array) {
    const toml::table* table = item.as_table();
    if (table == nullptr) {
      return std::nullopt;
    }
    data::SourceChoice source;
    for (const auto& [name, value] : *table) {
      const bool is_path = name == "path" && value.is_string();
      const bool is_weight = name == "weight" && value.is_number();
      FLATSHARD_CHECK(
          is_path || is_weight,
          config,
          "{}: {} expected path = \"folder\" and weight = number in a table "
          "of its list, got {} = {}",
          where,
          key.full_name,
          config::shortened(name.str()),
          shown(value));
      if (is_path) {
        source.path = expand_home(*value.value<std::string>());
      } else {
        source.weight = *value.value<double>();
      }
    }
    FLATSHARD_CHECK(
        !source.path.empty(),
        config,
        "{}: {}: a table of its list has no path",
        where,
        key.full_name);
    sources.push_back(std::move(source));
  }
  if (sources.size() == 1) {
    sources[0].weight = 1;  // a single source has all the weight
  }
  return sources;
}

ParameterRule read_param_group(
    const ConfigKey& key,
    const toml::table& table,
    const std::string& where) {
  ParameterRule rule;
  const std::vector<std::string_view> texts{"pattern", "name", "state_dtype"};
  std::vector<std::string_view> names = texts;
  for (const config::RuleNumber& number : config::rule_numbers()) {
    names.push_back(number.name);
  }
  for (const auto& [name, value] : table) {
    const std::string at =
        fmt::format("{}: {}: {}", where, key.full_name, name.str());
    if (name == "pattern" && value.is_string()) {
      rule.pattern = *value.value<std::string>();
      continue;
    }
    if (name == "name" && value.is_string()) {
      rule.algorithm =
          value_of(at, config::kWords<Algorithm>, *value.value<std::string>());
      continue;
    }
    if (name == "state_dtype" && value.is_string()) {
      rule.state_dtype = value_of(
          at,
          config::kWords<StateFormat>,
          *value.value<std::string>());
      continue;
    }
    const auto numbers = config::rule_numbers();
    const auto number =
        std::ranges::find(numbers, name.str(), &config::RuleNumber::name);
    if (number == numbers.end()) {
      const std::string near = near_name(name.str(), names);
      FLATSHARD_CHECK(
          std::ranges::count(texts, name.str()) > 0,
          config,
          "{}: {} has no '{}' in a table of its list; {}",
          where,
          key.full_name,
          config::shortened(name.str()),
          near.empty() ? fmt::format("it has {}", fmt::join(names, ", "))
                       : fmt::format("did you mean '{}'?", near));
      FLATSHARD_THROW(
          config,
          "{}: expected text in quotes, got {}",
          at,
          shown(value));
    }
    const ValueRange& range = number->range;
    const double found = value.is_number() ? *value.value<double>() : -1;
    FLATSHARD_CHECK(
        std::isfinite(found) && found >= range.min && found <= range.max,
        config,
        "{}: expected a number {}, got {}",
        at,
        range.max < 1e300 ? fmt::format("in [{}, {}]", range.min, range.max)
                          : fmt::format(">= {}", range.min),
        shown(value));
    number->set(rule, found);
  }
  FLATSHARD_CHECK(
      !rule.pattern.empty(),
      config,
      "{}: {}: a table of its list has no pattern, a regular expression that "
      "is searched in the names of parameters",
      where,
      key.full_name);
  return rule;
}

/// [[optimizer.param_groups]], or [{ pattern = "regex", ... }, ...]; unset when
/// it is not a list of tables.
std::optional<std::vector<ParameterRule>> read_param_groups(
    const ConfigKey& key,
    const toml::node& node,
    const std::string& where) {
  const toml::array* array = node.as_array();
  if (array == nullptr) {
    return std::nullopt;
  }
  std::vector<ParameterRule> rules;
  for (const toml::node& item : *array) {
    const toml::table* table = item.as_table();
    if (table == nullptr) {
      return std::nullopt;
    }
    rules.push_back(read_param_group(key, *table, where));
  }
  return rules;
}

/// Returns a list of texts, also of a single one; unset for other values.
std::optional<std::vector<std::string>> read_texts(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) {
    return std::vector<std::string>{*text};
  }
  const toml::array* array = node.as_array();
  if (array == nullptr) {
    return std::nullopt;
  }
  std::vector<std::string> texts;
  for (const toml::node& item : *array) {
    const auto text = item.value_exact<std::string>();
    if (!text) {
      return std::nullopt;
    }
    texts.push_back(*text);
  }
  return texts;
}

/// Returns an integer, also written as 1e4 or 10000.0: any floating-point
/// number that represents an integer exactly.
std::optional<std::int64_t> read_integer(const toml::node& node) {
  constexpr double kLargest = 0x1p53;
  const auto real = node.value_exact<double>();
  if (real && std::trunc(*real) == *real && std::abs(*real) <= kLargest) {
    return static_cast<std::int64_t>(*real);
  }
  return node.value_exact<std::int64_t>();
}

void set_field(
    const ConfigKey& key,
    Config& config,
    const toml::node& node,
    const std::string& where) {
  const ConfigField field = key.field(config);
  bool ok = false;
  const auto take = [&]<class T>(auto* target, std::optional<T> value) {
    ok = value.has_value();
    if (ok) {
      *target = *value;
    }
  };
  std::visit(
      config::Overloaded{
          [&](std::string* out) {
            take(out, node.value_exact<std::string>());
            if (ok && key.is_path) {
              *out = expand_home(*out);
            }
          },
          [&](const WordField& out) {
            const auto word = node.value_exact<std::string>();
            ok = word.has_value();
            if (ok && !out.set(*word)) {
              config::check_word(key, *word, where);
            }
          },
          [&](std::vector<std::string>* out) { take(out, read_texts(node)); },
          [&](std::vector<data::SourceChoice>* out) {
            take(out, read_sources(key, node, where));
          },
          [&](std::vector<ParameterRule>* out) {
            take(out, read_param_groups(key, node, where));
          },
          [&](bool* out) { take(out, node.value_exact<bool>()); },
          [&](std::optional<bool>* out) {
            take(out, node.value_exact<bool>());
          },
          [&](std::int64_t* out) { take(out, read_integer(node)); },
          [&](std::optional<std::int64_t>* out) {
            take(out, read_integer(node));
          },
          // An integer is a number, too: `lr = 1`.
          [&](auto* out) {
            if (node.is_number()) {
              take(out, node.value<double>());
            }
          }},
      field);
  FLATSHARD_CHECK(
      ok,
      config,
      "{}: {} expected {}, got {}",
      where,
      key.full_name,
      config::type_name(field),
      shown(node));
  config::check_value(key, field, where);
}

/// A key of a hundred thousand dots becomes that many nested tables, and their
/// destructors would overflow the stack.
void check_line_lengths(std::string_view text, const std::string& origin) {
  constexpr std::size_t kLongest = 10000;
  for (std::size_t line = 1; !text.empty(); ++line) {
    const std::size_t length = std::min(text.find('\n'), text.size());
    FLATSHARD_CHECK(
        length <= kLongest,
        config,
        "{}: line {}: expected at most {} characters, got {}",
        origin,
        line,
        kLongest,
        length);
    text.remove_prefix(std::min(length + 1, text.size()));
  }
}

toml::table parse_toml(std::string_view text, const std::string& origin) {
  check_line_lengths(text, origin);
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    FLATSHARD_THROW(
        config,
        "{}: not TOML: {}",
        place(origin, error.source()),
        error.description());
  } catch (const TomlAssertion&) {
    FLATSHARD_THROW(
        config,
        "{}: not TOML: a name or value has characters that do not belong there",
        origin);
  }
}

void apply_table(
    Config& config,
    const toml::table& table,
    const std::string& origin) {
  for (const auto& [section, node] : table) {
    const std::string where = place(origin, node.source());
    const toml::table* keys = node.as_table();
    FLATSHARD_CHECK(
        keys != nullptr || config::is_section(section.str()),
        config,
        "{}: key '{}' stands in no section; keys belong under [run], [model], "
        "[training] and so on{}",
        where,
        config::shortened(section.str()),
        config::hint_without_section(section.str()));
    config::check_section(section.str(), where);
    FLATSHARD_CHECK(
        keys != nullptr,
        config,
        "{}: expected a section [{}], got {}",
        where,
        section.str(),
        shown(node));
    for (const auto& [name, value] : *keys) {
      const std::string at = place(origin, value.source());
      set_field(
          config::find_key(section.str(), name.str(), at),
          config,
          value,
          at);
    }
  }
}

/// @return the full name of the key.
std::string_view apply_override(Config& config, const std::string& text) {
  const std::string where = fmt::format("--set {}", config::shortened(text));
  const auto equals = text.find('=');
  const auto dot = text.find('.');
  FLATSHARD_CHECK(
      equals != std::string::npos && dot < equals,
      config,
      "{}: expected --set section.key=value{}",
      where,
      config::hint_without_section(text.substr(0, equals)));
  const std::string section = text.substr(0, dot);
  const std::string name = text.substr(dot + 1, equals - dot - 1);
  std::string value = text.substr(equals + 1);
  const ConfigKey& key = config::find_key(section, name, where);
  const ConfigField field = key.field(config);
  const bool may_be_list =
      std::holds_alternative<std::vector<std::string>*>(field) ||
      std::holds_alternative<std::vector<data::SourceChoice>*>(field);
  const bool is_list = may_be_list && value.starts_with('[');
  const bool holds_text = std::holds_alternative<std::string*>(field) ||
                          std::holds_alternative<WordField>(field) ||
                          may_be_list;
  if (holds_text && !is_list && !value.starts_with('"') &&
      !value.starts_with('\'')) {
    set_field(key, config, toml::value<std::string>(value), where);
    return key.full_name;
  }
  check_line_lengths(value, where);
  value = config::typed_value(value, field);
  const toml::parse_result parsed = [&]() -> toml::parse_result {
    try {
      return toml::parse("value = " + value);
    } catch (const toml::parse_error&) {
    } catch (const TomlAssertion&) {}
    FLATSHARD_THROW(
        config,
        "{}: {} expected {}, got '{}'",
        where,
        key.full_name,
        config::type_name(field),
        config::shortened(value));
  }();
  FLATSHARD_CHECK(
      parsed.size() == 1,
      config,
      "{}: expected one value, got '{}'",
      where,
      config::shortened(value));
  set_field(key, config, *parsed.get("value"), where);
  return key.full_name;
}

}  // namespace

Config parse_config(
    std::string_view text,
    const std::string& origin,
    const std::vector<std::string>& overrides,
    std::vector<std::string>* notes) {
  Config config;
  apply_table(config, parse_toml(text, origin), origin);
  std::set<std::string_view> overridden;
  for (const std::string& item : overrides) {
    overridden.insert(apply_override(config, item));
  }
  const auto settled = config::settle_overrides(config, overridden);
  if (notes != nullptr) {
    notes->insert(notes->end(), settled.begin(), settled.end());
  }
  validate_config(config);
  return config;
}

Config load_config(
    const std::filesystem::path& path,
    const std::vector<std::string>& overrides,
    std::vector<std::string>* notes) {
  std::error_code error;
  const bool is_file = std::filesystem::is_regular_file(path, error);
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  // Reading nothing from an empty file would set the stream's failbit.
  FLATSHARD_CHECK(
      is_file && file && (file.peek() == EOF || text << file.rdbuf()),
      io,
      "cannot read the config {}; expected a TOML file (all keys: flatshard "
      "train --help-config)",
      path.string());
  return parse_config(text.str(), path.string(), overrides, notes);
}

}  // namespace flatshard
