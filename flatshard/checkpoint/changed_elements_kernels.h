#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/device/float_dtype.h"

/// Kernels of changed_elements.h on raw device pointers; no torch here. Each
/// queues on `stream` and returns. The caller checks the launch.
namespace flatshard::kernels {

/// A warp compares a tile.
constexpr std::int64_t kTileElements = 1024;
/// 128 elements have a bit each in four words. Bit l of word i is the element
/// 4 * l + i.
constexpr std::int64_t kTileWords = kTileElements / 32;
/// The first changes of a tile are stored while it is compared. Tiles with more
/// changes are read again.
constexpr std::int64_t kTileStored = kTileElements / 8;

/// Device pointers of one comparison. `tiles` is numel / kTileElements, rounded
/// up.
struct CompareElements {
  const void* now = nullptr;  ///< [numel]
  void* copy = nullptr;       ///< [numel]
  std::int64_t numel = 0;
  FloatDtype now_dtype = FloatDtype::float32;
  FloatDtype copy_dtype = FloatDtype::float32;
  bool adds = false;                 ///< to the bits that `marks` has
  std::uint32_t* marks = nullptr;    ///< [tiles, kTileWords] 16-byte aligned
  std::int64_t* counts = nullptr;    ///< [tiles] of changes
  void* values = nullptr;            ///< [tiles, kTileStored] like copy
  std::uint16_t* offsets = nullptr;  ///< [tiles, kTileStored] in the tile
};
void compare_elements(const CompareElements& args, cudaStream_t stream);

/// num_before[i] = changes of elements before borders[i].
/// @param ends  [tiles] the sums of counts up to each tile.
void count_elements(
    const std::uint32_t* marks,
    const std::int64_t* ends,
    const std::int64_t* borders,
    std::int64_t* num_before,
    std::int64_t num_borders,
    cudaStream_t stream);

/// See ElementRun. The run has at least one element.
struct ListElements {
  const void* copy = nullptr;
  const std::uint32_t* marks = nullptr;
  const std::int64_t* ends = nullptr;  ///< as in count_elements
  const void* values = nullptr;
  const std::uint16_t* offsets = nullptr;
  int nbytes = 2;  ///< of an element of copy
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t num_before = 0;
  std::int64_t shift = 0;
  void* out_indices = nullptr;
  bool wide = false;  ///< out_indices are int64; otherwise int32
  void* out_values = nullptr;
};
void list_elements(const ListElements& args, cudaStream_t stream);

}  // namespace flatshard::kernels
