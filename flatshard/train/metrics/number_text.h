#pragma once

#include <cstdint>
#include <string>

// Numbers as people read them.
namespace flatshard {

inline constexpr double kGiB = 1024.0 * 1024 * 1024;  ///< bytes

/// Floating-point operations in the unit that leaves a number to read:
/// 2.5e9 -> "2.50 GFLOP", 3100 -> "3.10 KFLOP".
std::string format_flop(double flop);

/// 950 -> "950", 1234567 -> "1.23M", 4.5e12 -> "4.50T"
std::string format_count(std::int64_t value);

/// 1234567 -> "1,234,567"
std::string with_commas(std::int64_t value);

/// Returns seconds as "42s", "3m05s" or "1h02m".
std::string format_duration(double seconds);

}  // namespace flatshard
