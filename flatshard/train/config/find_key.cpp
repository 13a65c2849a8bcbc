#include "flatshard/train/config/find_key.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"
#include "flatshard/train/config/other_names.h"
#include "flatshard/train/config/run_config.h"

namespace flatshard::config {
namespace {

std::vector<std::string> section_names() {
  std::vector<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    if (names.empty() || names.back() != key.section()) {
      names.emplace_back(key.section());
    }
  }
  return names;
}

/// Returns the full names of the keys with that name in all sections.
std::vector<std::string_view> keys_named(std::string_view name) {
  std::vector<std::string_view> found;
  for (const ConfigKey& key : config_keys()) {
    if (key.name() == name) {
      found.push_back(key.full_name);
    }
  }
  return found;
}

/// Names the key that has another trainer's name, else the most similar key of
/// the section, or else keys of that name in other sections. Without any it
/// names all keys of the section.
[[noreturn]] void throw_unknown_key(
    std::string_view section,
    std::string_view name,
    const std::string& where) {
  FLATSHARD_CHECK(
      section != "validation" || name != "steps",
      config,
      "{}: section [validation] has no key 'steps' any more; give 'sequences', "
      "the number of sequences that are validated on (steps times the global "
      "batch)",
      where);
  const std::string hint = hint_for_other_name(name);
  FLATSHARD_CHECK(
      hint.empty(),
      config,
      "{}: section [{}] has no key '{}'; {}",
      where,
      section,
      shortened(name),
      hint);
  std::vector<std::string> in_section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section() == section) {
      in_section.emplace_back(key.name());
    }
  }
  const std::string elsewhere =
      fmt::format("{}", fmt::join(keys_named(name), "' or '"));
  std::string near = near_name(name, in_section);
  if (near.empty() || (!elsewhere.empty() && edit_distance(name, near) > 2)) {
    near = elsewhere;
  }
  FLATSHARD_THROW(
      config,
      "{}: section [{}] has no key '{}'; {}",
      where,
      section,
      shortened(name),
      near.empty() ? fmt::format("its keys are {}", fmt::join(in_section, ", "))
                   : fmt::format("did you mean '{}'?", near));
}

}  // namespace

bool is_section(std::string_view section) {
  const auto names = section_names();
  return std::ranges::find(names, section) != names.end();
}

void check_section(std::string_view section, const std::string& where) {
  if (is_section(section)) {
    return;
  }
  const auto names = section_names();
  std::string near(section_for_other_name(section));
  if (near.empty()) {
    near = near_name(section, names);
  }
  FLATSHARD_THROW(
      config,
      "{}: unknown section [{}]; {}",
      where,
      shortened(section),
      near.empty() ? fmt::format("there are [{}]", fmt::join(names, "], ["))
                   : fmt::format("did you mean [{}]?", near));
}

std::string hint_without_section(std::string_view name) {
  const auto own = keys_named(name);
  const std::string hint = own.empty()
                               ? hint_for_other_name(name)
                               : fmt::format("give {}", fmt::join(own, " or "));
  return hint.empty() ? "" : "; " + hint;
}

const ConfigKey& find_key(
    std::string_view section,
    std::string_view name,
    const std::string& where) {
  check_section(section, where);
  for (const ConfigKey& key : config_keys()) {
    if (key.section() == section && key.name() == name) {
      return key;
    }
  }
  throw_unknown_key(section, name, where);
}

}  // namespace flatshard::config
