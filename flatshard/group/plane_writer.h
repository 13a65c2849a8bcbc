#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "flatshard/float8/flat_run.h"
#include "flatshard/float8/formats.h"

namespace flatshard {

/// The parts of planes that a writer of main weights may encode in its pass
/// over them, and their places. The next all-gather then encodes only the rest.
/// Codec::writer makes it, and AdamW fills it.
struct PlaneWriter {
  /// Parts of the shard, ascending and apart from each other. The space
  /// between them is padding.
  std::vector<float8::FlatRun> runs;
  /// CUDA: the bytes of `runs`.
  at::Tensor device_runs;
  /// float32: max(amax, a block's largest magnitude) at the places of the runs;
  /// NaN stays NaN. Undefined: not requested.
  at::Tensor amax;
  /// mxfp8 (E4M3) of each 32 elements, and their E8M0 scales: one byte per
  /// element, filled at the places of the runs. Undefined: not requested.
  at::Tensor data;
  at::Tensor scales;
  float8::Rounding rounding = float8::Rounding::up;

  bool wanted() const { return amax.defined() || data.defined(); }
  /// Called before each pass, on its stream.
  void zero() const {
    if (amax.defined()) {
      amax.zero_();
    }
  }
  /// Copies `runs` to where kernels read them.
  void upload(at::Device device);
};

}  // namespace flatshard
