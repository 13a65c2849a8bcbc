#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace flatshard {

/// The memory in use of the graphs of one pool.
///
/// Memory that a recording freed serves the next one, also for the tensors that
/// it keeps. So a replay overwrites the memory of graphs recorded *later*. It
/// overwrites nothing in use when graphs are replayed in the order of their
/// recording, the order of a step. This class detects any other order.
class GraphUses {
 public:
  /// Returns the number of the next recording.
  std::int64_t next() { return ++num_recorded_; }
  /// Returns whether memory is in use of a graph recorded as `number` or later.
  bool blocks(std::int64_t number);
  /// A replay of that graph: what it wrote is in use as long as the token.
  std::shared_ptr<void> begin(std::int64_t number);
  /// Rises with each call of `begin`.
  std::int64_t clock() const { return clock_; }
  /// Since then a graph recorded before `number` was replayed.
  bool began_before(std::int64_t number, std::int64_t since) const;

 private:
  struct Use {
    std::int64_t number = 0;
    std::weak_ptr<void> token;
  };
  std::vector<Use> uses_;                 ///< numbers rise
  std::vector<std::int64_t> last_clock_;  ///< by number
  std::int64_t num_recorded_ = 0;
  std::int64_t clock_ = 0;
};

}  // namespace flatshard
