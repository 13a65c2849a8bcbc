#pragma once

#include <string>
#include <string_view>

#include "flatshard/train/config.h"

namespace flatshard {

/// For std::visit over a ConfigField.
template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

/// "an integer", "text in quotes" and so on, for messages.
std::string_view type_name(const ConfigField& field);

/// The value as TOML, empty when it is unset.
std::string value_text(const ConfigField& field);

}  // namespace flatshard
