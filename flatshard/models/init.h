#pragma once

#include "flatshard/models/config.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/rms_norm.h"

#include <cmath>
#include <utility>

namespace flatshard::models {

// How a model's matrices are initialized.

inline float init_std(const ModelConfig& config) {
  return static_cast<float>(config.initializer_range);
}

/// Returns the initialization of projections into the residual stream: its
/// variance then does not grow with the number of layers.
inline InitSpec residual_init(const ModelConfig& config) {
  return InitSpec::normal(
      0.0F,
      init_std(config) / std::sqrt(2.0F * static_cast<float>(config.layers)));
}

/// Column-parallel over `ranks`.
inline nn::LinearOptions plain_linear(
    const ModelConfig& config,
    bool bias = false,
    nn::TensorParallelPtr ranks = nullptr) {
  return {
      .bias = bias,
      .init = InitSpec::normal(0.0F, init_std(config)),
      .ranks = std::move(ranks)};
}

/// Row-parallel over `ranks`.
inline nn::LinearOptions residual_linear(
    const ModelConfig& config,
    bool bias = false,
    nn::TensorParallelPtr ranks = nullptr) {
  return {
      .bias = bias,
      .init = residual_init(config),
      .ranks = std::move(ranks),
      .cut = nn::LinearCut::row};
}

inline nn::RmsNormOptions norm_options(const ModelConfig& config) {
  return {.eps = config.norm_eps, .adds_one = config.block.norms_add_one};
}

}  // namespace flatshard::models
