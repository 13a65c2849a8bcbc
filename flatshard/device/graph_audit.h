#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flatshard {

/// The addresses in the nodes of a graph. A kernel's parameters may have
/// uninitialized room, so an address found there need not belong to the kernel.
struct GraphAudit {
  std::int64_t nodes = 0;  ///< kernels, copies and fills that were looked at
  /// Words of their parameters that are addresses of the device's allocator.
  std::int64_t addresses = 0;
  /// The addresses in memory that the graph may not touch, each with its node.
  std::vector<std::string> strays;
};

/// The memory that a graph may touch, among all memory of an allocator.
class GraphMemory {
 public:
  void add_managed(std::uint64_t begin, std::uint64_t nbytes);
  /// Managed or not.
  void allow(std::uint64_t begin, std::uint64_t nbytes);

  enum class Kind { no_address, allowed, stray };
  /// The end of what is allowed counts as allowed: loops compare with it.
  Kind kind(std::uint64_t word) const;

 private:
  using Ranges = std::map<std::uint64_t, std::uint64_t>;  ///< begin, end
  static bool holds(const Ranges& ranges, std::uint64_t word, bool end_too);

  Ranges managed_;
  Ranges allowed_;
};

/// Returns the words of `nbytes` bytes that may be pointers: 8 bytes at
/// multiples of 8.
std::vector<std::uint64_t> words_of(const void* data, std::size_t nbytes);

/// "NAME, word 2: 0x7f..."; a kernel's name is demangled.
std::string
describe_stray(const std::string& name, std::size_t index, std::uint64_t word);

}  // namespace flatshard
