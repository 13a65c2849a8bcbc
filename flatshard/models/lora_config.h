#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::models {

/// The target that means every linear layer of the blocks.
inline constexpr std::string_view kAllLinear = "all-linear";

/// Initialization of the A matrices. B is initialized to zeros.
enum class LoraInit {
  kaiming_uniform,  ///< A as torch initializes nn.Linear: peft's default
  gaussian,         ///< A normal with deviation 1 / rank: peft's "gaussian"
};

/// The adapters of a model. Source: Hu et al., arXiv:2106.09685.
struct LoraConfig {
  std::int64_t rank = 0;  ///< 0: no adapters
  double alpha = 16.0;
  /// The scale is alpha / sqrt(rank) instead of alpha / rank.
  /// Source: Kalajdzievski, arXiv:2312.03732.
  bool rslora = false;
  double dropout = 0.0;
  LoraInit init = LoraInit::kaiming_uniform;
  /// Last parts of modules' names, or kAllLinear.
  std::vector<std::string> targets{std::string(kAllLinear)};
  /// Last parts of module names, or shell patterns of full module names.
  std::vector<std::string> exclude;

  bool enabled() const { return rank > 0; }
  /// Returns the scaling factor of an adapter's output.
  double scale() const {
    const auto r = static_cast<double>(rank);
    return alpha / (rslora ? std::sqrt(r) : r);
  }
};

}  // namespace flatshard::models
