#include "flatshard/train/config/key.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <regex>

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/train/config/param_group_list.h"
#include "flatshard/train/config/run_config.h"

namespace flatshard {

std::string_view ConfigKey::section() const {
  return full_name.substr(0, full_name.find('.'));
}

std::string_view ConfigKey::name() const {
  return full_name.substr(full_name.find('.') + 1);
}

std::vector<std::string_view> ConfigKey::words() const {
  if (!choices.empty()) {
    return choices;
  }
  Config config;
  const ConfigField member = field(config);
  const auto* of_type = std::get_if<WordField>(&member);
  return of_type == nullptr ? choices : of_type->words();
}

namespace config {
namespace {

template <class T, class Plain>
concept IsOrOptional =
    std::same_as<T, Plain> || std::same_as<T, std::optional<Plain>>;

/// Returns a number as TOML that reads back to the same double.
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

/// Returns a TOML basic string.
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

std::string list_text(const std::vector<std::string>& texts) {
  std::vector<std::string> quoted;
  for (const std::string& text : texts) {
    quoted.push_back(quoted_text(text));
  }
  return fmt::format("[{}]", fmt::join(quoted, ", "));
}

/// Returns one folder as text, several as an array of tables, each on a line.
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

/// Returns an array of tables, each on a line, without numbers that have their
/// default.
std::string rules_text(const std::vector<ParameterRule>& rules) {
  if (rules.empty()) {
    return "[]";
  }
  std::string text = "[";
  for (const ParameterRule& rule : rules) {
    text += fmt::format("\n  {{ pattern = {}", quoted_text(rule.pattern));
    if (rule.algorithm) {
      text += fmt::format(", name = \"{}\"", word_of(*rule.algorithm));
    }
    if (rule.state_dtype) {
      text += fmt::format(", state_dtype = \"{}\"", word_of(*rule.state_dtype));
    }
    for (const RuleNumber& number : rule_numbers()) {
      if (const auto value = number.of(rule)) {
        text += fmt::format(", {} = {}", number.name, number_text(*value));
      }
    }
    text += " },";
  }
  return text + "\n]";
}

void check_range(
    const ConfigKey& key,
    double number,
    const std::string& value,
    const std::string& where) {
  const ValueRange& range = key.range;
  FLATSHARD_CHECK(
      (std::isfinite(number) && number >= range.min && number <= range.max) ||
          (range.or_minus_one && number == -1),
      config,
      "{}: {} expected {}a number {}, got {}",
      where,
      key.full_name,
      range.or_minus_one ? "-1 or " : "",
      range.max >= 1e300 ? fmt::format(">= {}", range.min)
                         : fmt::format("in [{}, {}]", range.min, range.max),
      value);
}

void check_no_nul(
    const ConfigKey& key,
    const std::string& value,
    const std::string& where) {
  FLATSHARD_CHECK(
      value.find('\0') == std::string::npos,
      config,
      "{}: {} has a NUL character; file names cannot contain one",
      where,
      key.full_name);
}

void check_sources(
    const ConfigKey& key,
    const std::vector<data::SourceChoice>& sources,
    const std::string& where) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    check_no_nul(key, sources[i].path, where);
    FLATSHARD_CHECK(
        std::isfinite(sources[i].weight) && sources[i].weight > 0,
        config,
        "{}: {} expected a weight above 0 for {}, got {}",
        where,
        key.full_name,
        shortened(sources[i].path),
        sources[i].weight);
    for (std::size_t j = 0; j < i; ++j) {
      FLATSHARD_CHECK(
          sources[j].path != sources[i].path,
          config,
          "{}: {} names {} twice; give it the sum of its weights once",
          where,
          key.full_name,
          shortened(sources[i].path));
    }
  }
}

}  // namespace

std::string_view type_name(const ConfigField& field) {
  return std::visit(
      Overloaded{
          [](const auto&) { return "text in quotes"; },
          [](std::vector<std::string>*) {
            return "text in quotes, or a list of such texts";
          },
          [](std::vector<data::SourceChoice>*) {
            return "a folder in quotes, or a list of { path = \"folder\", "
                   "weight = number }";
          },
          [](std::vector<ParameterRule>*) {
            return "a list of { pattern = \"regex\", ... }";
          },
          []<IsOrOptional<std::int64_t> T>(T*) { return "an integer"; },
          []<IsOrOptional<double> T>(T*) { return "a number"; },
          []<IsOrOptional<bool> T>(T*) { return "true or false"; }},
      field);
}

std::string value_text(const ConfigField& field) {
  return std::visit(
      Overloaded{
          [](std::string* value) { return quoted_text(*value); },
          [](const WordField& value) {
            return fmt::format("\"{}\"", value.get());
          },
          [](std::vector<std::string>* value) { return list_text(*value); },
          [](std::vector<data::SourceChoice>* value) {
            return sources_text(*value);
          },
          [](std::vector<ParameterRule>* value) { return rules_text(*value); },
          [](std::int64_t* value) { return fmt::format("{}", *value); },
          [](double* value) { return number_text(*value); },
          [](bool* value) { return bool_text(*value); },
          // An optional one.
          [](auto* value) {
            return *value ? value_text(&**value) : std::string();
          }},
      field);
}

std::string plain_text(const ConfigField& field) {
  if (const auto* text = std::get_if<std::string*>(&field)) {
    return **text;
  }
  const auto* word = std::get_if<WordField>(&field);
  return word != nullptr ? word->get() : value_text(field);
}

bool differs_from_default(const Config& config, const ConfigKey& key) {
  Config copy = config;
  Config defaults;
  return value_text(key.field(copy)) != value_text(key.field(defaults));
}

void set_to_default(Config& config, const ConfigKey& key) {
  Config defaults;
  const ConfigField value = key.field(defaults);
  std::visit(
      Overloaded{
          [&](const WordField& member) {
            member.set(std::get<WordField>(value).get());
          },
          [&](auto* member) { *member = *std::get<decltype(member)>(value); }},
      key.field(config));
}

std::string shortened(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  return text.size() <= kLongest
             ? std::string(text)
             : std::string(text.substr(0, kLongest)) + "...";
}

std::string typed_value(const std::string& value, const ConfigField& field) {
  constexpr std::size_t kLongest = 64;  // longest number; regex is recursive
  if (std::holds_alternative<bool*>(field) ||
      std::holds_alternative<std::optional<bool>*>(field)) {
    std::string lower = value;
    for (char& c : lower) {
      c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    return lower == "true" || lower == "false" ? lower : value;
  }
  static const std::regex kNumber(
      R"(([+-]?)0*([0-9][0-9_]*)?(\.([0-9][0-9_]*)?)?([eE][+-]?[0-9]+)?)");
  std::smatch parts;
  const bool has_digits =
      value.find_first_of("0123456789") < value.find_first_of("eE");
  if (!has_digits || value.size() > kLongest ||
      !std::regex_match(value, parts, kNumber)) {
    return value;
  }
  const auto or_zero = [](const std::string& digits) {
    return digits.empty() ? "0" : digits;
  };
  std::string number = parts[1].str() + or_zero(parts[2]);
  if (parts[3].matched) {
    number += "." + or_zero(parts[4]);
  }
  return number + parts[5].str();
}

void check_word(
    const ConfigKey& key,
    std::string_view text,
    const std::string& where) {
  const auto words = key.words();
  const std::string near = near_name(text, words);
  FLATSHARD_CHECK(
      std::ranges::find(words, text) != words.end(),
      config,
      "{}: {} expected one of {}, got \"{}\"{}",
      where,
      key.full_name,
      fmt::join(words, ", "),
      shortened(text),
      near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
}

void check_value(
    const ConfigKey& key,
    const ConfigField& field,
    const std::string& where) {
  const auto in_range = [&](auto number) {
    check_range(
        key,
        static_cast<double>(number),
        fmt::format("{}", number),
        where);
  };
  std::visit(
      Overloaded{
          [&](std::string* value) {
            check_no_nul(key, *value, where);
            if (!key.choices.empty()) {
              check_word(key, *value, where);
            }
          },
          [&](std::vector<std::string>* value) {
            for (const std::string& text : *value) {
              check_word(key, text, where);
            }
          },
          [&](std::vector<data::SourceChoice>* value) {
            check_sources(key, *value, where);
          },
          [](std::vector<ParameterRule>*) {},  // checked as they are read
          // The word comes from a Config that a program filled in.
          [&](const WordField& value) {
            if (!value.words().empty()) {
              check_word(key, value.get(), where);
            }
          },
          []<IsOrOptional<bool> T>(T*) {},
          [&](std::int64_t* value) { in_range(*value); },
          [&](double* value) { in_range(*value); },
          [&](auto* value) {
            if (*value) {
              in_range(**value);
            }
          }},
      field);
}

}  // namespace config
}  // namespace flatshard
