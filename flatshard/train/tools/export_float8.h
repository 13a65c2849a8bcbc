#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/format/safetensors.h"
#include "flatshard/models/config.h"
#include "flatshard/train/setup/float8_choice.h"

namespace flatshard {

/// Weights in FP8 in the form of DeepSeek-V3's folders. A linear layer's
/// `weight` [out, in] is F8_E4M3. Next to it is `weight_scale_inv` [ceil(out /
/// 128), ceil(in / 128)] F32, the factors of the elements of a block.
/// Everything else is bfloat16. Source: README_WEIGHTS.md of
/// deepseek-ai/DeepSeek-V3.
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

  /// @param weight  [out, in] of any float dtype, on the CPU.
  /// @return data [out, in] float8_e4m3fn and scales [ceil(out / 128),
  ///   ceil(in / 128)] float32.
  /// @throws Error{config} naming a weight that is not finite.
  static float8::Plane quantize(
      const std::string& name,
      const at::Tensor& weight);

  /// Returns the name of the scales of a weight.
  static std::string scales_name(const std::string& weight) {
    return weight + "_scale_inv";
  }
  /// Returns a config.json with the `quantization_config` that transformers
  /// reads.
  std::string with_quantization(const std::string& config_json) const;

 private:
  Float8Choice choice_;
  std::int64_t num_weights_ = 0;
  std::vector<std::string> kept_;  ///< modules in bfloat16 by choice
};

}  // namespace flatshard
