#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/float8/quantize.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/models/config.h"
#include "flatshard/train/setup/float8_choice.h"

namespace flatshard {

/// The FP8 weights of an exported folder: float8_blocks.h.
class Float8Export {
 public:
  /// @param choice  of the run: weights that it kept in bfloat16 stay so.
  explicit Float8Export(Float8Choice choice) : choice_(std::move(choice)) {}

  /// Adds a tensor to the tensors of the folder. Linear layers of blocks become
  /// FP8: matrices `model.layers.*_proj.weight`.
  /// @param parameters  stored in the tensor; it stays bfloat16 if one of them
  ///   does.
  void add(
      const SafetensorsSpec& tensor,
      const std::vector<std::string>& parameters,
      std::vector<SafetensorsSpec>& to);
  /// Returns how many tensors became FP8.
  std::int64_t num_weights() const { return num_weights_; }

  /// quantize_blocks of a weight on the CPU.
  static float8::Plane quantize(
      const std::string& name,
      const at::Tensor& weight);

  /// Returns a config.json with the `quantization_config` that transformers
  /// reads.
  std::string with_quantization(const std::string& config_json) const;

 private:
  Float8Choice choice_;
  std::int64_t num_weights_ = 0;
  std::vector<std::string> kept_;  ///< modules in bfloat16 by choice
};

}  // namespace flatshard
