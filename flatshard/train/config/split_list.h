#pragma once

#include <string>
#include <vector>

namespace flatshard {

/// Returns the items of a key that lists names: "a, b" -> {"a", "b"}.
std::vector<std::string> split_list(const std::string& text);

}  // namespace flatshard
