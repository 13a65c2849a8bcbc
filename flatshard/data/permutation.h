#pragma once

#include <cstdint>

namespace flatshard::data {

/// A pseudo-random permutation of [0, size) that needs no memory: a balanced
/// Feistel network over the next power of four with Philox as its round
/// function, and with cycle walking back into the range.
/// Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
/// CT-RSA 2002.
class Permutation {
 public:
  /// @param size  in [1, 2^62].
  Permutation(std::uint64_t key, std::int64_t size);

  std::int64_t size() const { return size_; }
  /// Returns the image of index i; a bijection of [0, size).
  std::int64_t operator()(std::int64_t i) const;

 private:
  std::uint64_t round_trip(std::uint64_t value) const;

  std::uint64_t key_;
  std::int64_t size_;
  int half_bits_;
};

}  // namespace flatshard::data
