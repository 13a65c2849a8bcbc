#pragma once

#include "flatshard/train/config/run_config.h"

// The writers of rows of a table of keys; only their files need them.
namespace flatshard::config {

template <class T>
ConfigField field_of(T& member) {
  if constexpr (HasWords<T>) {
    return WordField{
        .get = [&member] { return std::string(word_of(member)); },
        .set =
            [&member](std::string_view word) {
              return read_word(kWords<T>, word, member);
            },
        .words = [] { return words_of(kWords<T>); }};
  } else {
    return &member;
  }
}

/// A row of a section's table (sections/) as a ConfigKey.
#define KEY_ROW(section, type, name, value, ...) \
  KEY_OF_MEMBER(section, name, __VA_ARGS__)
#define KEY_OF_MEMBER(section, name, text, ...)                    \
  ConfigKey{                                                       \
      .full_name = #section "." #name,                             \
      .field = [](Config& config) -> ConfigField {                 \
        return ::flatshard::config::field_of(config.section.name); \
      },                                                           \
      .help = text __VA_OPT__(, ) __VA_ARGS__},

/// A condition on the config `c`.
#define WHEN(...) [](const Config& c) -> bool { return __VA_ARGS__; }

// Far above any realistic run, and low enough that multiplying them does not
// overflow and a cast to int does not truncate.
inline constexpr double kMaxSteps = 1e12;
inline constexpr double kMaxTokens = 1 << 24;
inline constexpr double kMaxBatch = 1 << 30;
inline constexpr double kMaxRanks = 1 << 20;

}  // namespace flatshard::config
