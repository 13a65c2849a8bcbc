#pragma once

#include <cstdint>
#include <vector>

namespace flatshard::data {

/// Order in which several sources are sampled. Any prefix of n samples contains
/// each source in proportion, to within one sample for each source before it. A
/// function of the sample index only, so it has no state to save.
///
/// Source 0 against all others, then source 1 against the rest, and so on: of
/// two sides with the shares f and 1 - f, the first has floor(n f + 1/2) of the
/// first n turns. Shares are fixed-point numbers, so that all machines agree.
class Mixture {
 public:
  /// A sample is number `index` of source `source`, both counted from 0.
  struct Turn {
    std::size_t source = 0;
    std::int64_t index = 0;

    bool operator==(const Turn&) const = default;
  };

  /// @param weights  each above 0; only their ratios matter.
  /// @throws Error{config} naming a weight that is not, or so small compared
  /// with the others that its source would never be used.
  explicit Mixture(const std::vector<double>& weights);

  /// @param sample  in [0, 2^62).
  Turn operator()(std::int64_t sample) const;

  /// Returns the fraction of each source in all samples, in units of 2^-32.
  const std::vector<std::int64_t>& shares() const { return shares_; }

 private:
  std::vector<std::int64_t> shares_;
  std::vector<std::uint64_t> of_rest_;  ///< the same, among the remaining ones
};

}  // namespace flatshard::data
