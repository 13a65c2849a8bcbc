#pragma once

#include "flatshard/models/config.h"
#include "flatshard/moe/grouped_linear.h"
#include "flatshard/moe/nodes.h"
#include "flatshard/moe/permute.h"
#include "flatshard/moe/router.h"
#include "flatshard/moe/token_exchange.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/rms_norm.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace flatshard::models {

/// How experts are trained; their shape is ModelConfig's.
struct MoeOptions {
  double aux_loss = 0.0;  ///< see nn::route
  double z_loss = 0.0;
  /// Above 0: an expert takes at most so many times its even share of a
  /// microbatch's tokens of this rank. 0: it takes all that come.
  double capacity_factor = 0.0;
  bool force_balance = false;  ///< see nn::balanced_choice
  /// Where tokens go; null: all experts are here.
  std::shared_ptr<nn::TokenExchange> exchange;
  /// Experts that this module holds; 0: all.
  std::int64_t local_experts = 0;
  /// Width of the part of each expert that this module holds, which divides
  /// that of the model's; 0: all of it. `exchange` adds up what the parts give.
  std::int64_t local_ffn_dim = 0;
  /// That share the shared experts, and route a part of the tokens each; see
  /// LlamaOptions::ranks.
  nn::TensorParallelPtr ranks = nullptr;
};

/// What the forward of a layer of experts decided for its tokens. A recompute
/// is given that of the first run: it must not route again, since scores that
/// nearly tie may come out the other way and other rows would be sent.
struct RoutingRecord {
  std::optional<nn::Routing> routing;  ///< before tokens were dropped
  nn::Permutation permutation;
  nn::ExchangePlanPtr plan;
};

/// Hooks of modules see nothing of it: integers have no gradients.
template <class F>
void for_each_tensor(const RoutingRecord& /*record*/, F&& /*fn*/) {
}

/// What a router did since it was last asked. On the router's device.
struct RouterLoad {
  at::Tensor counts;          ///< int64 [experts]: how often each was chosen
  at::Tensor kept;            ///< int64 []: choices that were not dropped
  at::Tensor balance;         ///< float32 []: sum of nn::load_balance
  std::int64_t measured = 0;  ///< forwards that balance is the sum of
};

/// Scores tokens and chooses their experts: parameters weight [experts, dim]
/// and, with BlockOptions::mlp_bias, bias [experts], which scores contain. The
/// bias of the choice is no parameter: training moves it by the load, see
/// `update_bias`.
class RouterImpl : public nn::Module {
 public:
  RouterImpl(
      const ModelConfig& config,
      const MoeOptions& options,
      nn::LossGradientPtr loss_gradient);
  /// @param x       [tokens, dim]
  /// @param chosen  see nn::route; such a call counts nothing.
  /// @param scored  score(x), where that is there already.
  nn::Routing forward(
      const at::Tensor& x,
      const nn::Routing* chosen,
      const at::Tensor& scored = {});
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
  /// What training forwards did since the last call; undefined tensors when
  /// there was none.
  RouterLoad take_load();
  /// For the layer: so many choices were kept of its last routing.
  void count_kept(const at::Tensor& kept);

 private:
  void count(const nn::Routing& routing, const at::Tensor& logits);
  /// Made once for a number of tokens: it is the same for all.
  const nn::Routing& balanced_choice_for(const at::Tensor& x);

  const std::int64_t num_experts_;
  const bool has_bias_;
  const bool force_balance_;
  const nn::RouterOptions options_;
  const nn::LossGradientPtr loss_gradient_;
  bool measures_balance_ = false;
  RouterLoad load_;
  std::optional<nn::Routing> balanced_;  ///< of force_balance_
  at::Tensor weight_;
  at::Tensor linear_bias_;  ///< or undefined
  at::Tensor bias_;
};
FLATSHARD_MODULE(Router);

/// The experts: parameters gate_up_proj and down_proj, as ExpertLayout has
/// them, and with BlockOptions::mlp_bias gate_up_proj_bias [experts, 2 *
/// ffn_dim] and down_proj_bias [experts, dim].
class ExpertsImpl : public nn::Module {
 public:
  ExpertsImpl(const ModelConfig& config, const MoeOptions& options);
  /// @param x        rows as a dispatch delivers them, or where all experts are
  ///   here tokens, [tokens, dim]
  /// @param weights  float32, of each row
  /// @return         the weighted results of each row:
  ///   [ExchangePlan::num_received, dim]
  at::Tensor forward(
      const at::Tensor& x,
      const at::Tensor& weights,
      const RoutingRecord& record);
  /// No row is exchanged.
  bool are_all_here() const { return are_all_here_; }

 private:
  const bool are_all_here_;
  const nn::GateActivation activation_;
  const nn::ExpertLayout layout_;
  at::Tensor gate_up_proj_, gate_up_proj_bias_;
  at::Tensor down_proj_, down_proj_bias_;
};
FLATSHARD_MODULE(Experts);

/// Whether a parameter of a model, by its name there, is one of Experts.
bool is_expert_parameter(std::string_view name);

/// A feed-forward part of experts: h + shared(norm(h)) + the weighted sum of
/// the chosen experts' results. Modules gate, experts, shared_experts.
class MoeImpl : public nn::Module {
 public:
  MoeImpl(
      const ModelConfig& config,
      const MoeOptions& options,
      const nn::LossGradientPtr& loss_gradient);
  /// @param x, delta  [batch, seq, dim], h = x + delta; delta may be undefined
  /// @param record    of this call; filled by its first run.
  at::Tensor forward(
      const at::Tensor& x,
      const at::Tensor& delta,
      nn::RmsNormImpl* norm,
      RoutingRecord* record);

  /// Appends what forward does to `nodes`.
  /// @param in      numbers of x and delta, as for forward
  /// @param record  of this call; exists as long as `nodes`.
  void append_nodes(
      nn::Nodes& nodes,
      const std::vector<int>& in,
      nn::RmsNormImpl* norm,
      RoutingRecord* record);

  RouterImpl& router() { return *gate_; }

 private:
  /// What there is before the choice, a region: norm and scores.
  struct BeforeChoice {
    at::Tensor rows;  ///< [tokens, dim] to route
    at::Tensor sum;   ///< what their results are added to, of as many elements
    at::Tensor logits;
  };
  /// @param x, delta  as for `forward`
  BeforeChoice before_choice(
      const at::Tensor& x,
      const at::Tensor& delta,
      nn::RmsNormImpl& norm);
  /// @param rows  [tokens, dim]
  /// @return      sum + the shared experts' results, of sum's sizes
  at::Tensor run_shared(const at::Tensor& rows, const at::Tensor& sum);
  /// The first run of a call chooses, and fills `record`.
  nn::Routing choose(const BeforeChoice& before, RoutingRecord& record);
  /// What the choice means for rows, in `record`.
  void plan(const nn::Routing& routing, RoutingRecord& record);

  const double capacity_factor_;
  std::shared_ptr<nn::TokenExchange> exchange_;  ///< null: all are here
  Router gate_{nullptr};
  Experts experts_{nullptr};
  std::shared_ptr<nn::Module> shared_;
  nn::Linear shared_gate_{nullptr}, shared_up_{nullptr}, shared_down_{nullptr};
};
FLATSHARD_MODULE(Moe);

}  // namespace flatshard::models
