#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "flatshard/format/safetensors.h"

namespace flatshard {

/// Reads matrices of experts that are stored as MXFP4: numbers of four bits
/// (E2M1), in blocks of 32 with one scale, a power of two.
///
/// A tensor NAME is stored as a pair: NAME_blocks [experts, out, in / 32, 16]
/// with two numbers per byte, the lower half first, and NAME_scales [experts,
/// out, in / 32], exponents plus 127. Here it is a bfloat16 tensor [experts,
/// in, out], as in transformers. bfloat16 represents these numbers exactly.
/// Source: OCP Microscaling Formats (MX) Specification 1.0.
class Mxfp4Tensors {
 public:
  static constexpr std::string_view kBlocks = "_blocks";
  static constexpr std::string_view kScales = "_scales";

  /// One of the two tensors of a pair, and the file that contains it.
  struct Part {
    const SafetensorsReader* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };
  struct Pair {
    SafetensorsEntry entry;  ///< the tensor of bfloat16
    Part blocks;
    Part scales;
  };

  /// Adds a pair. The files have to stay.
  /// @return  where it stays.
  /// @throws Error{format} for shapes that do not belong together.
  const Pair& add(const std::string& name, Part blocks, Part scales);

  /// Fills `out` with bytes of pair.entry from byte `begin` on. Caches the last
  /// unpacked expert, since reads are sequential. Thread-safe: concurrent calls
  /// are serialized.
  void read(const Pair& pair, std::uint64_t begin, std::span<std::byte> out);

 private:
  void unpack(const Pair& pair, std::int64_t expert);

  std::deque<Pair> pairs_;
  std::mutex mutex_;
  const Pair* pair_ = nullptr;  ///< of `values_`
  std::int64_t expert_ = 0;
  std::vector<std::uint16_t> values_;  ///< [in, out]
  std::vector<std::byte> blocks_, scales_;
};

}  // namespace flatshard
