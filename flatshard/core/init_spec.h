#pragma once

namespace flatshard {

/// How a parameter's first values are drawn. A leaf value: a layer states it
/// when it registers the parameter, the Initializer evaluates it for the
/// elements that a rank owns.
struct InitSpec {
  enum class Kind { zeros, ones, normal, uniform };

  Kind kind = Kind::zeros;
  float mean = 0.0F;    ///< normal
  float stddev = 1.0F;  ///< normal
  float low = 0.0F;     ///< uniform
  float high = 1.0F;    ///< uniform

  static constexpr InitSpec zeros() { return {.kind = Kind::zeros}; }
  static constexpr InitSpec ones() { return {.kind = Kind::ones}; }
  static constexpr InitSpec normal(float mean, float stddev) {
    return {.kind = Kind::normal, .mean = mean, .stddev = stddev};
  }
  static constexpr InitSpec uniform(float low, float high) {
    return {.kind = Kind::uniform, .low = low, .high = high};
  }

  constexpr bool operator==(const InitSpec&) const = default;
};

}  // namespace flatshard
