#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace flatshard {

/// Philox4x32-10, a counter-based generator: the i-th block depends only on
/// (key, i), so any rank can draw any element of any tensor independently.
/// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
/// SC 2011.
class Philox {
 public:
  explicit constexpr Philox(std::uint64_t key)
      : key_{
            static_cast<std::uint32_t>(key),
            static_cast<std::uint32_t>(key >> 32)} {}

  /// Four independent uniform 32-bit words for 128-bit counter (hi, lo).
  constexpr std::array<std::uint32_t, 4> operator()(
      std::uint64_t lo,
      std::uint64_t hi = 0) const {
    std::array<std::uint32_t, 4> c{
        static_cast<std::uint32_t>(lo),
        static_cast<std::uint32_t>(lo >> 32),
        static_cast<std::uint32_t>(hi),
        static_cast<std::uint32_t>(hi >> 32)};
    std::uint32_t k0 = key_[0];
    std::uint32_t k1 = key_[1];
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53} * c[0];
      const std::uint64_t p1 = std::uint64_t{0xCD9E8D57} * c[2];
      c = {
          static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0,
          static_cast<std::uint32_t>(p1),
          static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1,
          static_cast<std::uint32_t>(p0)};
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return c;
  }

 private:
  std::array<std::uint32_t, 2> key_;
};

/// Returns a word as a float in [0, 1) with 24 random bits.
constexpr float uniform_float(std::uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24F;
}

/// FNV-1a, 64 bits: a stable hash of a name, the same on every machine.
constexpr std::uint64_t stable_hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3ULL;
  }
  return hash;
}

/// Returns one well-mixed key from two numbers (splitmix64 finalizer).
constexpr std::uint64_t mix_keys(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a + 0x9e3779b97f4a7c15ULL * (b + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace flatshard
