#include "flatshard/train/metrics/number_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace flatshard {

std::string with_commas(std::int64_t value) {
  const std::string digits = fmt::format("{}", value);
  const std::size_t first = value < 0 ? 1 : 0;
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > first && (digits.size() - i) % 3 == 0) {
      text += ',';
    }
    text += digits[i];
  }
  return text;
}

std::string format_count(std::int64_t value) {
  constexpr std::array<const char*, 5> kUnits = {"", "K", "M", "B", "T"};
  auto number = static_cast<double>(value);
  std::size_t unit = 0;
  // Use the next unit for a number that would be rounded to 1000.
  while (number >= 999.995 && unit + 1 < kUnits.size()) {
    number /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::to_string(value)
                   : fmt::format("{:.2f}{}", number, kUnits.at(unit));
}

std::string format_duration(double seconds) {
  const auto total = std::llround(std::clamp(seconds, 0.0, 1e9));
  if (total < 60) {
    return fmt::format("{}s", total);
  }
  if (total < 3600) {
    return fmt::format("{}m{:02}s", total / 60, total % 60);
  }
  return fmt::format("{}h{:02}m", total / 3600, total / 60 % 60);
}

std::string format_flop(double flop) {
  constexpr std::array<const char*, 6> kUnits =
      {"FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"};
  std::size_t unit = 0;
  while (flop >= 1000 && unit + 1 < kUnits.size()) {
    flop /= 1000;
    ++unit;
  }
  return fmt::format("{:.2f} {}", flop, kUnits.at(unit));
}

}  // namespace flatshard
