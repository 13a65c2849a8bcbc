#pragma once

#include "flatshard/models/router_module.h"
#include "flatshard/moe/grouped_linear.h"
#include "flatshard/moe/nodes.h"
#include "flatshard/moe/permute.h"
#include "flatshard/nn/documents.h"
#include "flatshard/nn/linear.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/parallel/context_parallel.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/nn/rms_norm.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace flatshard::models {

/// The decisions of a layer of experts for its tokens, in its forward. A
/// recompute gets the record of the first run: it must not route again, since
/// scores that nearly tie may come out the other way and other rows would be
/// sent.
struct RoutingRecord {
  /// bool [tokens] of this rank: tokens that have no expert and that nothing
  /// counts; undefined: none. Set before the first run.
  at::Tensor padding;
  std::optional<nn::Routing> routing;  ///< before tokens were dropped
  nn::Permutation permutation;
  nn::ExchangePlanPtr plan;
};

/// Hooks of modules see nothing of it: integers have no gradients.
template <class F>
void for_each_tensor(const RoutingRecord& /*record*/, F&& /*fn*/) {
}

/// The experts: parameters gate_up_proj and down_proj, as ExpertLayout has
/// them, and with BlockOptions::mlp_bias gate_up_proj_bias [experts, 2 *
/// ffn_dim] and down_proj_bias [experts, dim].
class ExpertsImpl : public nn::Module {
 public:
  ExpertsImpl(const ModelConfig& config, const MoeOptions& options);
  /// @param x        rows as a dispatch delivers them, or where all experts are
  ///   here tokens, [tokens, dim]
  /// @param weights  float32, of each row
  /// @param is_unread  see nn::gated_linear
  /// @return         the weighted results of each row:
  ///   [ExchangePlan::num_received, dim]
  at::Tensor forward(
      const at::Tensor& x,
      const at::Tensor& weights,
      const RoutingRecord& record,
      bool is_unread);

 private:
  const bool are_all_here_;
  const nn::GateActivation activation_;
  const nn::ExpertLayout layout_;
  at::Tensor gate_up_proj_, gate_up_proj_bias_;
  at::Tensor down_proj_, down_proj_bias_;
};
FLATSHARD_MODULE(Experts);

/// Returns whether a parameter of a model, by its name there, is one of
/// Experts.
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
  /// @param is_result_of_part  see LlamaMlpImpl::forward. Then a second run
  ///   makes only what a backward reads.
  at::Tensor forward(
      const at::Tensor& x,
      const at::Tensor& delta,
      nn::RmsNormImpl* norm,
      RoutingRecord* record,
      bool is_result_of_part = false);

  /// Appends what forward does to `nodes`.
  /// @param in      numbers of x and delta, as for forward
  /// @param record  of this call; exists as long as `nodes`.
  /// @param is_result_of_part  as for forward
  void append_nodes(
      nn::Nodes& nodes,
      const std::vector<int>& in,
      nn::RmsNormImpl* norm,
      RoutingRecord* record,
      bool is_result_of_part);

  RouterImpl& router() { return *gate_; }
  /// Returns the record of a new call.
  std::shared_ptr<RoutingRecord> new_record(
      const nn::Documents& documents) const;

 private:
  /// Norm and scores, a region.
  /// @param x, delta  as for `forward`
  /// @return  rows [tokens, dim] to route, the sum of as many elements that
  ///   their results are added to, and logits
  nn::TensorList
  score(const at::Tensor& x, const at::Tensor& delta, nn::RmsNormImpl& norm);
  /// @param in  rows [tokens, dim], sum
  /// @param is_result_of_part  as for forward
  /// @return    sum + the shared experts' results, of sum's sizes
  nn::TensorList run_shared(const nn::TensorList& in, bool is_result_of_part);
  /// Plans the rows for the choice, in `record`.
  void plan(const nn::Routing& routing, RoutingRecord& record);

  const double capacity_factor_;
  const nn::TensorParallelPtr ranks_;  ///< see MoeOptions
  const nn::ContextParallelPtr token_ranks_;
  std::shared_ptr<nn::TokenExchange> exchange_;  ///< null: all are here
  Router gate_{nullptr};
  Experts experts_{nullptr};
  std::shared_ptr<nn::Module> shared_;
  nn::Linear shared_gate_{nullptr}, shared_up_{nullptr}, shared_down_{nullptr};
};
FLATSHARD_MODULE(Moe);

}  // namespace flatshard::models
