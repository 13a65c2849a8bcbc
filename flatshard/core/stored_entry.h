#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard {

/// A tensor of a file of weights, or consecutive rows of one.
struct StoredEntry {
  std::string name;
  std::vector<std::int64_t> shape;  ///< of these rows
  std::int64_t first_row = 0;
  std::int64_t num_rows = 0;  ///< of the tensor; 0: the entry is all of it

  std::int64_t numel() const {
    std::int64_t n = 1;
    for (const std::int64_t size : shape) {
      n *= size;
    }
    return n;
  }
  bool is_whole() const { return num_rows == 0; }
  std::vector<std::int64_t> tensor_shape() const {
    std::vector<std::int64_t> whole = shape;
    if (!is_whole()) {
      whole.front() = num_rows;
    }
    return whole;
  }
  /// Returns the first element, from the start of the tensor.
  std::int64_t begin() const {
    return is_whole() ? 0 : first_row * (numel() / shape.front());
  }
  bool operator==(const StoredEntry&) const = default;
};

/// The entries of a parameter of this name and shape, one after another and
/// each as it is in the parameter. Most parameters are one entry.
using StoredEntriesOf = std::function<std::vector<StoredEntry>(
    const std::string& name,
    const std::vector<std::int64_t>& shape)>;

}  // namespace flatshard
