#pragma once

#include <cstdint>

// The arguments of the router's kernels, on the CPU and on CUDA; no torch here.
namespace flatshard::nn {

enum class RouterScore {
  softmax,  ///< over all experts
  sigmoid,  ///< each expert for itself
};

/// Rules to compute weights from scores, and to choose experts.
struct RouterRule {
  std::int64_t num_experts = 0;
  std::int64_t experts_per_token = 0;
  std::int64_t groups = 1;
  std::int64_t kept_groups = 1;
  RouterScore score = RouterScore::softmax;
  bool normalize = true;
  float epsilon = 0.0F;
  float scale = 1.0F;
};

struct RouterForward {
  RouterRule rule;
  std::int64_t tokens = 0;
  const float* logits = nullptr;    ///< [tokens, num_experts]
  const float* bias = nullptr;      ///< [num_experts] or null
  bool chosen = false;              ///< `experts` is given, and read
  std::int32_t* experts = nullptr;  ///< [tokens, experts_per_token]
  float* weights = nullptr;         ///< [tokens, experts_per_token]
};

struct RouterBackward {
  RouterRule rule;
  std::int64_t tokens = 0;
  const float* logits = nullptr;
  const std::int32_t* experts = nullptr;
  const float* dweights = nullptr;  ///< [tokens, experts_per_token]
  /// [num_experts], read where aux is not 0 or there is padding: how often each
  /// was chosen.
  const std::int32_t* counts = nullptr;
  /// [tokens] or null: tokens whose losses are 0. The mean uses the other
  /// tokens: the sum of `counts` over experts_per_token.
  const bool* padding = nullptr;
  /// One element, or null: 1. It is the gradient of the loss that aux and z are
  /// added to.
  const float* loss_gradient = nullptr;
  float aux = 0.0F;          ///< coefficient of the load-balancing loss
  float z = 0.0F;            ///< coefficient of the z loss
  float* dlogits = nullptr;  ///< [tokens, num_experts], overwritten
};

}  // namespace flatshard::nn
