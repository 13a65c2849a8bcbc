#include "flatshard/data/mixture.h"

#include <cmath>
#include <numeric>

#include "flatshard/core/error.h"

namespace flatshard::data {
namespace {

constexpr int kShareBits = 32;
constexpr std::uint64_t kOne = std::uint64_t{1} << kShareBits;

/// floor(n share + 1/2), for n < 2^62.
std::int64_t turns_among(std::int64_t n, std::uint64_t share) {
  const auto count = static_cast<std::uint64_t>(n);
  const std::uint64_t high = (count >> kShareBits) * share;
  const std::uint64_t low = (count & (kOne - 1)) * share;
  // low is below 2^64 - 2^32, so this does not overflow.
  return static_cast<std::int64_t>(high + ((low + kOne / 2) >> kShareBits));
}

}  // namespace

Mixture::Mixture(const std::vector<double>& weights) {
  FLATSHARD_CHECK(
      !weights.empty(),
      config,
      "expected at least one source, got 0");
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  double rest = all;
  for (const double weight : weights) {
    FLATSHARD_CHECK(
        std::isfinite(weight) && weight > 0 && std::isfinite(all),
        config,
        "weight: expected a number above 0, got {}",
        weight);
    const bool last = of_rest_.size() + 1 == weights.size();
    const double of_rest = last ? 1.0 : std::min(1.0, weight / rest);
    shares_.push_back(std::llround(weight / all * static_cast<double>(kOne)));
    of_rest_.push_back(static_cast<std::uint64_t>(
        std::llround(of_rest * static_cast<double>(kOne))));
    FLATSHARD_CHECK(
        shares_.back() > 0 && (last || of_rest_.back() < kOne),
        config,
        "weight: {} is too small or too large compared with the others (their "
        "sum is {})",
        weight,
        all - weight);
    rest -= weight;
  }
}

Mixture::Turn Mixture::operator()(std::int64_t sample) const {
  FLATSHARD_CHECK(
      sample >= 0 && sample < (std::int64_t{1} << 62),
      usage,
      "expected a sample in [0, 2^62), got {}",
      sample);
  std::int64_t turn = sample;
  for (std::size_t source = 0; source + 1 < of_rest_.size(); ++source) {
    const std::int64_t before = turns_among(turn, of_rest_[source]);
    if (turns_among(turn + 1, of_rest_[source]) > before) {
      return {source, before};
    }
    turn -= before;
  }
  return {of_rest_.size() - 1, turn};
}

}  // namespace flatshard::data
