#include "flatshard/format/mxfp4.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

constexpr std::int64_t kGroup = 32;  // numbers with one scale
constexpr std::int64_t kGroupBytes = 16;
constexpr std::int64_t kTile = 32;  // rows that are transposed together
constexpr int kBias = 127;
constexpr std::array<float, 8> kMagnitudes{0, 0.5, 1, 1.5, 2, 3, 4, 6};

using Numbers = std::array<std::uint16_t, 16>;

/// bfloat16 of each four bits at one scale. Nothing is rounded: two bits of
/// mantissa are left at the smallest exponent, too.
Numbers numbers_at(std::uint8_t scale) {
  Numbers numbers{};
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const float value = std::ldexp(kMagnitudes[i % 8], scale - kBias);
    const auto bits = std::bit_cast<std::uint32_t>(i < 8 ? value : -value);
    numbers[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  return numbers;
}

const std::array<Numbers, 256>& all_numbers() {
  static const std::array<Numbers, 256> all = [] {
    std::array<Numbers, 256> numbers{};
    for (std::size_t scale = 0; scale < numbers.size(); ++scale) {
      numbers[scale] = numbers_at(static_cast<std::uint8_t>(scale));
    }
    return numbers;
  }();
  return all;
}

}  // namespace

const Mxfp4Tensors::Pair&
Mxfp4Tensors::add(const std::string& name, Part blocks, Part scales) {
  const std::vector<std::int64_t>& shape = blocks.entry->shape;
  const std::vector<std::int64_t> groups(
      shape.begin(),
      shape.end() - (shape.empty() ? 0 : 1));
  FLATSHARD_CHECK(
      shape.size() == 4 && shape[3] == kGroupBytes &&
          groups == scales.entry->shape && scales.entry->dtype == "U8",
      format,
      "{}: tensor '{}': expected MXFP4 blocks [experts, out, in / 32, 16] and "
      "scales of U8 [experts, out, in / 32], got [{}] and {} [{}]",
      blocks.file->path().string(),
      name,
      fmt::join(shape, ", "),
      scales.entry->dtype,
      fmt::join(scales.entry->shape, ", "));
  Pair& pair = pairs_.emplace_back(Pair{.blocks = blocks, .scales = scales});
  pair.entry = {
      .name = name,
      .dtype = "BF16",
      .shape = {shape[0], shape[2] * kGroup, shape[1]}};
  safetensors_nbytes(
      pair.entry.shape,
      static_cast<std::int64_t>(sizeof(std::uint16_t)),
      pair.entry.end);
  return pair;
}

void Mxfp4Tensors::unpack(const Pair& pair, std::int64_t expert) {
  const std::int64_t rows = pair.entry.shape[2];
  const std::int64_t groups = pair.entry.shape[1] / kGroup;
  const auto read = [&](const Part& part,
                        std::int64_t group_nbytes,
                        std::vector<std::byte>& to) {
    to.resize(static_cast<std::size_t>(rows * groups * group_nbytes));
    part.file->read(
        *part.entry,
        static_cast<std::uint64_t>(expert) * to.size(),
        to);
  };
  pair_ = nullptr;  // until all is there
  read(pair.blocks, kGroupBytes, blocks_);
  read(pair.scales, 1, scales_);
  values_.resize(static_cast<std::size_t>(rows * groups * kGroup));
  std::array<std::array<std::uint16_t, kTile>, kGroup> tile{};
  for (std::int64_t first = 0; first < rows; first += kTile) {
    const std::int64_t count = std::min(kTile, rows - first);
    for (std::int64_t group = 0; group < groups; ++group) {
      for (std::int64_t row = 0; row < count; ++row) {
        const std::int64_t at = (first + row) * groups + group;
        const Numbers& numbers =
            all_numbers()[static_cast<std::size_t>(scales_[at])];
        const std::byte* packed = blocks_.data() + at * kGroupBytes;
        for (std::int64_t i = 0; i < kGroupBytes; ++i) {
          const auto both = static_cast<std::size_t>(packed[i]);
          tile[2 * i][row] = numbers[both & 15U];
          tile[2 * i + 1][row] = numbers[both >> 4U];
        }
      }
      for (std::int64_t i = 0; i < kGroup; ++i) {
        std::copy_n(
            tile[i].data(),
            count,
            values_.data() + (group * kGroup + i) * rows + first);
      }
    }
  }
  pair_ = &pair;
  expert_ = expert;
}

void Mxfp4Tensors::read(
    const Pair& pair,
    std::uint64_t begin,
    std::span<std::byte> out) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t nbytes =
      pair.entry.nbytes() / static_cast<std::uint64_t>(pair.entry.shape[0]);
  while (!out.empty()) {
    const auto expert = static_cast<std::int64_t>(begin / nbytes);
    if (pair_ != &pair || expert_ != expert) {
      unpack(pair, expert);
    }
    const std::uint64_t first = begin % nbytes;
    const std::size_t n = std::min<std::uint64_t>(out.size(), nbytes - first);
    std::memcpy(
        out.data(),
        reinterpret_cast<const std::byte*>(values_.data()) + first,
        n);
    begin += n;
    out = out.subspan(n);
  }
}

}  // namespace flatshard
