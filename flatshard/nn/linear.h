#pragma once

#include "flatshard/nn/lora/adapter.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/parallel/tensor_parallel.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace flatshard::nn {

/// y = x W^T (+ bias) (+ residual).
///
/// @param x         [..., in], any strides; the weight's dtype.
/// @param weight    [out, in]
/// @param bias      [out] or undefined
/// @param residual  [..., out] or undefined; added inside the matmul.
/// @param context   of the module that owns weight and bias; its WgradSink
///                  gets their gradients. May be null.
at::Tensor linear(
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& bias = {},
    const at::Tensor& residual = {},
    const ModuleContextPtr& context = {});

/// How a linear layer is split over the ranks of a TensorParallel.
enum class LinearCut {
  column,  ///< by output features: all-gathers the input tokens
  row,     ///< by input features: its results are reduce-scattered
};

struct LinearOptions {
  bool bias = false;
  InitSpec init = InitSpec::normal(0.0F, 0.02F);
  TensorParallelPtr ranks = nullptr;  ///< that share the layer; null: no others
  LinearCut cut = LinearCut::column;
};

/// How an adapter is made.
struct AdapterOptions {
  std::int64_t rank = 0;
  double scale = 1.0;
  InitSpec a_init;                               ///< B starts with zeros
  std::shared_ptr<const SampleDropout> dropout;  ///< null: none
  std::uint64_t dropout_key = 0;
};

/// Parameters: weight [out_features, in_features], bias [out_features], and
/// with an adapter lora_A.weight [rank, in_features] and lora_B.weight
/// [out_features, rank]. In a split layer, weight and bias are this rank's
/// part. A row-parallel layer has its full bias on each rank and adds it after
/// the sum, so only once.
class LinearImpl : public Module, public HasParts {
 public:
  /// @param in_features, out_features  of the full layer.
  /// @throws Error{config} when the ranks do not divide the split dimension.
  LinearImpl(
      std::int64_t in_features,
      std::int64_t out_features,
      LinearOptions options = {});
  /// @param x  [..., in_features]. Column-parallel layers read this rank's
  ///   tokens with all features, row-parallel ones all tokens with this rank's
  ///   features.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {});
  /// Makes this rank's part of a full layer; see LinearOptions. Does nothing
  /// for null `ranks`.
  /// @throws Error{usage} for a layer that has memory or is a part already.
  void share(TensorParallelPtr ranks, LinearCut cut);
  /// Adds an adapter to a layer without one. The layer itself trains as before:
  /// freeze its parameters for LoRA.
  /// @param shared  layer that shares its A; null: the adapter has its own A.
  /// @throws Error{config} for a dropout of a row-parallel layer if its part is
  ///   not a multiple of 4 columns.
  void add_adapter(
      const AdapterOptions& options,
      const LinearImpl* shared = nullptr);

  const at::Tensor& weight() const { return weight_; }
  /// [out_features, in_features] of the full layer.
  std::vector<std::int64_t> whole_shape() const;
  const at::Tensor& bias() const { return bias_; }
  /// Returns null without an adapter.
  const Adapter* adapter() const { return adapter_ ? &*adapter_ : nullptr; }
  /// Returns the ranks that a column-parallel layer all-gathers from, or null.
  const TensorParallelPtr& gathers_from() const { return gathers_from_; }
  /// Returns the ranks over which a row-parallel layer sums its results; else
  /// null.
  const TensorParallelPtr& sums_over() const { return sums_over_; }
  ParameterParts parts() const override { return parts_; }

 private:
  TensorParallelPtr gathers_from_;
  TensorParallelPtr sums_over_;
  ParameterParts parts_;
  at::Tensor weight_;
  at::Tensor bias_;
  std::optional<Adapter> adapter_;
};
FLATSHARD_MODULE(Linear);

/// Returns whether a call of these layers reads only their weights and biases.
/// All have a bias or none has. All all-gather from the same ranks or none
/// does. No hook needs the result of a single layer.
bool can_run_together(const std::vector<LinearImpl*>& layers);

/// The tensors of one node for several layers, in their order.
struct JointLinears {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;  ///< none, or one for each weight
  std::vector<ModuleContextPtr> contexts;
  std::vector<at::Tensor> factors;  ///< adapter_factors
  AdapterCallsPtr adapters;         ///< null: no layer has one
};

/// Starts a call of layers that can run together: checks x and runs the hooks
/// before their forward.
JointLinears begin_together(
    const at::Tensor& x,
    const std::vector<LinearImpl*>& layers);

/// Returns the gradient of a bias, from the gradient [rows, out] of the layer's
/// result.
at::Tensor deliver_bias_grad(
    const ModuleContextPtr& context,
    const at::Tensor& bias,
    const at::Tensor& dy);

/// y_i = x W_i^T (+ b_i) of layers that read one input. In backward the
/// gradients of that input add up inside the matmuls, so they need neither
/// separate tensors nor additions. Column-parallel layers all-gather once,
/// and reduce-scatter that sum once. Layers are called one by one instead if
/// only some have a bias, or if hooks run after their forward (separate
/// units).
///
/// @param x  [..., in]; of column-parallel layers this rank's tokens.
/// @return   one [..., out_i] per layer
std::vector<at::Tensor> linears(
    const at::Tensor& x,
    const std::vector<LinearImpl*>& layers);

}  // namespace flatshard::nn
