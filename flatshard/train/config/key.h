#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "flatshard/core/words.h"
#include "flatshard/data/token_source.h"
#include "flatshard/optim/parameter_values.h"

namespace flatshard {

struct Config;

namespace config {

/// The words of a type of key: an array of Word<T>, next to the type.
template <class T>
inline constexpr bool kWords = false;

template <class T>
concept HasWords = !std::same_as<decltype(kWords<T>), const bool>;

template <HasWords T>
std::string_view word_of(const T& value) {
  return flatshard::word_of(kWords<T>, value);
}

}  // namespace config

/// A member whose values have words, whatever its type.
struct WordField {
  std::function<std::string()> get;
  /// @return false if the word is unknown. @throws Error{config} for text that
  /// is not a value, where `words` is empty.
  std::function<bool(std::string_view word)> set;
  /// Returns all; empty when there are too many to list.
  std::function<std::vector<std::string_view>()> words;
};

/// A member of a Config.
using ConfigField = std::variant<
    std::string*,
    std::vector<std::string>*,
    std::vector<data::SourceChoice>*,
    std::vector<ParameterRule>*,
    std::int64_t*,
    double*,
    bool*,
    std::optional<std::int64_t>*,
    std::optional<double>*,
    std::optional<bool>*,
    WordField>;

/// The numbers that a key may have.
struct ValueRange {
  double min = 0;
  double max = 1e300;
  bool or_minus_one = false;  ///< -1 has a special meaning
};

/// A condition that a key requires to have an effect. Otherwise a key that is
/// set is an error, or is reset to its default if --set names the chooser.
struct UsedIf {
  std::string_view chooser;  ///< the key that the condition is about
  bool (*holds)(const Config&);
  std::string_view belongs_to;  ///< place where the key has an effect
};

/// Values of other keys that a key with another value than its default does not
/// work with.
struct Conflict {
  std::vector<std::string_view> with;  ///< full names
  bool (*found)(const Config&);
  std::string_view why;  ///< reason, and what to do
};

/// One row of the table of keys: parsing, printing, checks, the help text and
/// "did you mean" come from it. The default is the member's value in
/// `Config{}`.
struct ConfigKey {
  std::string_view full_name;  ///< section.name
  ConfigField (*field)(Config&);
  std::string_view help;
  ValueRange range = {};
  /// Valid texts, also of a list; empty: any.
  std::vector<std::string_view> choices = {};
  bool is_path = false;
  std::vector<UsedIf> used_if = {};  ///< all of them
  std::vector<Conflict> conflicts = {};

  std::string_view section() const;
  std::string_view name() const;
  /// Returns the words or choices that the value is one of; empty: any value.
  std::vector<std::string_view> words() const;
};

/// A file of sections/ is a section: a row KEY(type, name, default, "help",
/// .column = value...) is a member of the section's struct and a ConfigKey.
/// The struct includes the file with this macro as KEY, and the table of the
/// struct's source with KEY_ROW (key_rows.h).
#define KEY_MEMBER(type, name, value, ...) type name = value;

namespace config {

/// Used by std::visit over a ConfigField.
template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

/// Keys of related sections, and their checks that are not columns of a row.
struct KeyTable {
  std::span<const ConfigKey> keys;
  void (*check)(const Config&) = nullptr;  ///< @throws Error{config}
};

/// "an integer", "text in quotes" and so on, for messages.
std::string_view type_name(const ConfigField& field);

/// Returns the value as TOML; empty when it is unset.
std::string value_text(const ConfigField& field);

/// Returns the value in the form that `--set` accepts, without quotes.
std::string plain_text(const ConfigField& field);

/// Checks a value against its key's choices or range.
/// @param where  the place in a file, or the option, for the message.
/// @throws Error{config}.
void check_value(
    const ConfigKey& key,
    const ConfigField& field,
    const std::string& where);

/// Checks text against the words of the key. The key must have words.
/// @throws Error{config} naming them and the nearest one.
void check_word(
    const ConfigKey& key,
    std::string_view text,
    const std::string& where);

/// Returns what people type on a command line as TOML has it: .001, 5., 1.e4,
/// 007 and True. Anything else is returned unchanged.
std::string typed_value(const std::string& value, const ConfigField& field);

/// Returns the user's text, shortened to fit in an error message.
std::string shortened(std::string_view text);

bool differs_from_default(const Config& config, const ConfigKey& key);
void set_to_default(Config& config, const ConfigKey& key);

/// Applies the effects of --set on the rest of the config: keys without effect
/// are reset to their defaults, and a warm-up or a trace becomes shorter or
/// earlier to fit fewer steps.
/// @param overridden  full names of the keys that --set gave; they stay.
/// @return what was changed and why, one sentence per change.
std::vector<std::string> settle_overrides(
    Config& config,
    const std::set<std::string_view>& overridden);

}  // namespace config
}  // namespace flatshard
