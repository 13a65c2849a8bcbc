#pragma once

#include <string>
#include <vector>

#include "flatshard/train/config.h"

namespace flatshard {

/// A key that the chosen `chooser = value` leaves without use.
struct UnusedKey {
  const ConfigKey* key;
  std::string chooser;
  std::string value;
  std::string belongs_to;
};

/// The keys that are set and that something else in the config leaves without
/// use.
std::vector<UnusedKey> find_unused(const Config& config);

}  // namespace flatshard
