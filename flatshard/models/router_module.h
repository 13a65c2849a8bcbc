#pragma once

#include "flatshard/models/config.h"
#include "flatshard/moe/router.h"
#include "flatshard/moe/token_exchange.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/parallel/context_parallel.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <cstdint>
#include <memory>
#include <optional>

namespace flatshard::models {

/// Training options of experts. Their shapes are in ModelConfig.
struct MoeOptions {
  double aux_loss = 0.0;  ///< see nn::route
  double z_loss = 0.0;
  /// Capacity factor: an expert accepts at most this multiple of the average
  /// tokens per expert, per rank and microbatch. 0: no limit.
  double capacity_factor = 0.0;
  bool force_balance = false;  ///< see nn::balanced_choice
  /// Exchange for token dispatch and combine; null: all experts are local.
  std::shared_ptr<nn::TokenExchange> exchange;
  /// Experts of this module; 0: all.
  std::int64_t local_experts = 0;
  /// Width of this module's part of each expert. It must divide the width of
  /// the model; 0: all of it. `exchange` adds up the results of the parts.
  std::int64_t local_ffn_dim = 0;
  /// Ranks that share the shared experts, and route a part of the tokens each;
  /// see LlamaOptions::ranks.
  nn::TensorParallelPtr ranks = nullptr;
  /// See LlamaOptions::context.
  nn::ContextParallelPtr context = nullptr;
};

/// A router's choices since it was last asked. On the router's device.
struct RouterLoad {
  at::Tensor counts;          ///< int64 [experts]: how often each was chosen
  at::Tensor kept;            ///< int64 []: choices that were not dropped
  at::Tensor balance;         ///< float32 []: sum of nn::load_balance
  std::int64_t measured = 0;  ///< forwards that balance is the sum of
};

/// Scores tokens and chooses their experts. Parameters are weight [experts,
/// dim] and, with BlockOptions::mlp_bias, bias [experts], a part of the scores.
/// The bias of the choice is not a parameter: training updates it by the load,
/// see `update_bias`.
class RouterImpl : public nn::Module {
 public:
  RouterImpl(
      const ModelConfig& config,
      const MoeOptions& options,
      nn::LossGradientPtr loss_gradient);
  /// @param x       [tokens, dim]
  /// @param chosen  see nn::RouteOptions; such a call counts nothing.
  /// @param scored  score(x), where that exists already.
  /// @param padding see nn::RouteOptions
  nn::Routing forward(
      const at::Tensor& x,
      const nn::Routing* chosen,
      const at::Tensor& scored = {},
      const at::Tensor& padding = {});
  /// float32 [tokens, experts] for x [tokens, dim].
  at::Tensor score(const at::Tensor& x) const;

  std::int64_t num_experts() const { return num_experts_; }
  /// float32 [experts]; undefined for a router without one.
  const at::Tensor& bias() const { return bias_; }
  /// Gives a router with a bias memory for it, zeros.
  void make_bias(at::Device device);
  /// bias += rate * sign(mean(counts) - counts).
  /// Source: Wang et al., arXiv:2408.15664.
  void update_bias(const at::Tensor& counts, double rate);

  /// Whether training forwards measure the load-balancing loss.
  void set_measures_balance(bool on) { measures_balance_ = on; }
  /// Returns the choices of training forwards since the last call; undefined
  /// tensors when there was none.
  RouterLoad take_load();
  /// Called by the layer with the number of choices that were kept of its last
  /// routing. Counts them if a backward follows.
  void count_kept(const at::Tensor& kept);

 private:
  void count(
      const nn::Routing& routing,
      const at::Tensor& logits,
      const at::Tensor& padding);
  /// Made once for a number of tokens: it is the same for all.
  const nn::Routing& balanced_choice_for(const at::Tensor& x);

  const std::int64_t num_experts_;
  const bool has_bias_;
  const bool force_balance_;
  const nn::RouterOptions options_;
  const nn::LossGradientPtr loss_gradient_;
  bool measures_balance_ = false;
  RouterLoad load_;
  std::optional<nn::Routing> balanced_;  ///< set if force_balance_
  at::Tensor weight_;
  at::Tensor linear_bias_;  ///< or undefined
  at::Tensor bias_;
};
FLATSHARD_MODULE(Router);

}  // namespace flatshard::models
