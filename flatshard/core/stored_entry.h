#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// A tensor of a file of weights, by its name and shape.
struct StoredEntry {
  std::string name;
  std::vector<std::int64_t> shape;

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (const std::int64_t size : shape) {
      n *= size;
    }
    return n;
  }
  friend bool operator==(const StoredEntry&, const StoredEntry&) = default;
};

/// The entries that hold a parameter of this name and shape, one after another
/// and each as it lies in the parameter. Most parameters are one entry.
using StoredEntriesOf = std::function<std::vector<StoredEntry>(
    const std::string& name,
    const std::vector<std::int64_t>& shape)>;

}  // namespace flatshard
