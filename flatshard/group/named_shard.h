#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "flatshard/layout/tensor_slice.h"

namespace flatshard {

/// Ranks that store the same elements: how many they are, and the index of this
/// one.
struct Replicas {
  std::int64_t index = 0;
  std::int64_t count = 1;
};

/// One rank's part of one parameter: the view of optimizers and checkpoints on
/// the model. `tensor` is a view of the flat shard.
struct NamedShard {
  std::vector<std::string> names;   ///< the main name first; tied ones follow
  std::vector<std::int64_t> shape;  ///< of this rank's parameter
  TensorSlice slice;                ///< its part of the full tensor
  std::int64_t begin = 0;           ///< first owned element of it, flattened
  std::int64_t local_offset = 0;    ///< where that is in the flat shard
  at::Tensor tensor;                ///< [n], n >= 0 elements from `begin`
  std::map<std::string, std::string> attributes;  ///< as the user set them
  bool dropped = false;                           ///< see GroupParameter
  Replicas replicas;                              ///< of `tensor`

  const std::string& name() const { return names.front(); }
  std::vector<std::int64_t> whole_shape() const {
    return slice.whole_shape(shape);
  }
  /// Returns the boxes of the full tensor that `tensor` is, one after another.
  std::vector<Rectangle> boxes() const {
    return slice.boxes(shape, begin, begin + tensor.numel());
  }
};

}  // namespace flatshard
