#include "flatshard/train/config_value.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <regex>
#include <sstream>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/train/config_check.h"
#include "flatshard/train/config_field.h"

namespace flatshard {
namespace {

template <class T>
void check_range(const ConfigKey& key, T value, const std::string& where) {
  const auto number = static_cast<double>(value);
  FLATSHARD_CHECK(
      std::isfinite(number) && number >= key.min && number <= key.max,
      config,
      "{}: {} expected a number {}, got {}",
      where,
      key.full_name(),
      key.max >= 1e300 ? fmt::format(">= {}", key.min)
                       : fmt::format("in [{}, {}]", key.min, key.max),
      value);
}

void check_choice(
    const ConfigKey& key,
    const std::string& value,
    const std::string& where) {
  if (key.choices.empty()) {
    return;
  }
  std::vector<std::string> choices;
  std::istringstream list{std::string(key.choices)};
  for (std::string choice; std::getline(list, choice, '|');) {
    choices.push_back(choice);
  }
  const std::string near = near_name(value, choices);
  FLATSHARD_CHECK(
      std::find(choices.begin(), choices.end(), value) != choices.end(),
      config,
      "{}: {} expected one of {}, got \"{}\"{}",
      where,
      key.full_name(),
      fmt::join(choices, ", "),
      shortened(value),
      near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near));
}

void check_no_nul(
    const ConfigKey& key,
    const std::string& value,
    const std::string& where) {
  FLATSHARD_CHECK(
      value.find('\0') == std::string::npos,
      config,
      "{}: {} has a NUL character; no file name can hold one",
      where,
      key.full_name());
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
        key.full_name(),
        shortened(sources[i].path),
        sources[i].weight);
    for (std::size_t j = 0; j < i; ++j) {
      FLATSHARD_CHECK(
          sources[j].path != sources[i].path,
          config,
          "{}: {} names {} twice; give it the sum of its weights once",
          where,
          key.full_name(),
          shortened(sources[i].path));
    }
  }
}

}  // namespace

std::string shortened(std::string_view text) {
  constexpr std::size_t kLongest = 80;
  return text.size() <= kLongest
             ? std::string(text)
             : std::string(text.substr(0, kLongest)) + "...";
}

bool holds_path(const ConfigKey& key) {
  constexpr std::string_view kPaths[] = {
      "run.output_dir",
      "model.init_from",
      "model.hf_config",
      "checkpoint.folder",
      "profiling.folder"};
  return std::find(std::begin(kPaths), std::end(kPaths), key.full_name()) !=
         std::end(kPaths);
}

std::string typed_value(const std::string& value, const ConfigField& field) {
  constexpr std::size_t kLongest = 64;  // of a number; the match is recursive
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

void check_config_value(
    const ConfigKey& key,
    const ConfigField& field,
    const std::string& where) {
  std::visit(
      Overloaded{
          [&](std::string* value) {
            check_no_nul(key, *value, where);
            check_choice(key, *value, where);
          },
          [&](std::vector<data::SourceChoice>* value) {
            check_sources(key, *value, where);
          },
          [](bool*) {},
          [](std::optional<bool>*) {},
          [&](std::int64_t* value) { check_range(key, *value, where); },
          [&](double* value) { check_range(key, *value, where); },
          [&](auto* value) {
            if (*value) {
              check_range(key, **value, where);
            }
          }},
      field);
}

void check_config_values(const Config& config) {
  Config copy = config;
  for (const ConfigKey& key : config_keys()) {
    check_config_value(key, key.field(copy), "config");
  }
}

}  // namespace flatshard
