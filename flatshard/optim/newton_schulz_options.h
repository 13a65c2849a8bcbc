#pragma once

#include <array>
#include <cstdint>

namespace flatshard {

/// The defaults are the same as in torch.optim.Muon.
struct NewtonSchulzOptions {
  std::array<double, 3> coefficients = {3.4445, -4.7750, 2.0315};
  std::int64_t steps = 5;
  double eps = 1e-7;  ///< lower limit of the norm that divides a matrix

  /// @throws Error{config} when a value is out of range.
  void validate() const;
  bool operator==(const NewtonSchulzOptions&) const = default;
};

}  // namespace flatshard
