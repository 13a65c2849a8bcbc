#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "flatshard/nn/lora/sample_dropout.h"
#include "flatshard/nn/module.h"
#include "flatshard/nn/parallel/tensor_parallel.h"
#include "flatshard/ops/matmul_rows.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace flatshard::nn {

/// A factor of an adapter: parameter weight [out, in].
class LoraFactorImpl : public Module, public HasParts {
 public:
  LoraFactorImpl(std::int64_t out, std::int64_t in, InitSpec init);
  /// Another name of the same parameter.
  explicit LoraFactorImpl(const LoraFactorImpl& shared);
  /// Keeps a part of a factor that has no memory yet.
  void take(const ParameterPart& part);
  const at::Tensor& weight() const { return weight_; }
  ParameterParts parts() const override { return parts_; }

 private:
  at::Tensor weight_;
  ParameterParts parts_;
};
FLATSHARD_MODULE(LoraFactor);

/// The addend of a Linear to its result: scale * dropout(x) A^T B^T.
///
/// A column-parallel layer splits B like its weight, a row-parallel layer
/// splits A. The other factor is replicated on each rank, and its gradient is
/// the sum over the ranks. Source: Hu et al., arXiv:2106.09685.
struct Adapter {
  LoraFactor a{nullptr};  ///< [rank, in]
  LoraFactor b{nullptr};  ///< [out, rank]
  double scale = 1.0;
  std::shared_ptr<const SampleDropout> dropout;  ///< null: none
  /// The draws of the dropout; adapters with the same A have the same.
  std::uint64_t dropout_key = 0;
  std::int64_t dropout_column = 0;  ///< start of x in the full input
};

/// The adapters of the layers that one autograd node calls.
class AdapterCalls : public torch::CustomClassHolder {
 public:
  struct Call {
    std::size_t layer;  ///< its number in the node
    double scale;
    ModuleContextPtr a_context, b_context;
    std::shared_ptr<const SampleDropout> dropout;
    std::uint64_t dropout_key;
    std::int64_t dropout_column;
  };

  /// @param layers  of a node, in order; null for a layer without an adapter.
  /// @return null when none has one.
  static c10::intrusive_ptr<AdapterCalls> of(
      const std::vector<const Adapter*>& layers);

  const std::vector<Call>& all() const { return calls_; }
  /// Returns whether several adapters read the same x with the same scale:
  /// their A form one factor of a matmul.
  bool are_joint() const;

 private:
  std::vector<Call> calls_;
};
using AdapterCallsPtr = c10::intrusive_ptr<AdapterCalls>;

/// Returns A and B of each adapter: inputs of the node.
std::vector<at::Tensor> adapter_factors(
    const std::vector<const Adapter*>& layers);

/// The part that adapters have in a node's forward. If there is no dropout, the
/// A of all layers multiply the input as one matrix.
class AdapterForward {
 public:
  /// @param calls    may be null: then only the base layers are multiplied.
  /// @param factors  as adapter_factors returns them.
  /// @param x        [rows, in], what all layers of the node read.
  AdapterForward(
      const AdapterCallsPtr& calls,
      at::TensorList factors,
      const MatmulRows& x);

  /// y += the adapter of the layer, if it has one. An undefined y is set.
  /// @param y  [rows, out]
  void add(std::size_t layer, at::Tensor& y) const;
  /// Computes matmul_forward of x with the layer's adapter. The base matmul
  /// adds to the adapter's result where nothing else is added: that costs no
  /// separate pass over the result.
  at::Tensor matmul(
      std::size_t layer,
      const at::Tensor& weight,
      const ModuleContextPtr& context,
      const at::Tensor& bias = {},
      const at::Tensor& residual = {}) const;
  /// `matmul` of layer 0, summed over the ranks of a row-parallel layer; this
  /// rank keeps its tokens. Null: `matmul` itself.
  at::Tensor matmul_and_scatter(
      const TensorParallelPtr& ranks,
      const at::Tensor& weight,
      const ModuleContextPtr& context,
      const at::Tensor& bias = {},
      const at::Tensor& residual = {}) const;
  /// Appends what AdapterBackward reads.
  void save(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list& saved) const;

 private:
  const AdapterCallsPtr& calls_;
  at::TensorList factors_;
  const MatmulRows& x_;
  at::Tensor low_;  ///< [rows, all ranks]: scale * dropout(x) A^T of each call
};

/// The part that adapters have in a node's backward.
class AdapterBackward {
 public:
  /// Pops the tensors that AdapterForward saved from the end of `saved`.
  AdapterBackward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list& saved);

  /// The node has an adapter.
  explicit operator bool() const { return calls_ != nullptr; }
  std::size_t num_factors() const { return 2 * parts_.size(); }

  /// The place of the first factor among the node's edges, where only defined
  /// tensors count, and among the gradients that it returns.
  struct Places {
    std::size_t edge;
    std::size_t out;
  };
  void set_places(const Places& places) { places_ = places; }

  /// Reads the gradients [..., out] of all layers' results, undefined where
  /// there is none, and delivers the gradients of B.
  void begin(at::TensorList g, torch::autograd::variable_list& out);
  /// dx += the adapters' part, after `begin`. An undefined dx is set if there
  /// is a part, so the layers' matmuls then add to it.
  /// @param dx  [rows, in]
  void add_input_gradient(at::Tensor& dx) const;
  /// `end` will read the layer's input, if its result has a gradient.
  bool wants_input(std::size_t layer) const;
  /// Delivers the gradients of A.
  /// @param x  [..., in], the layers' input; unused if no A needs a gradient.
  void end(const at::Tensor& x, torch::autograd::variable_list& out) const;

 private:
  /// The part of one adapter.
  struct Part {
    at::Tensor a, b;
    at::Tensor low;           ///< [rows, rank], a part of all
    at::Tensor low_gradient;  ///< of dropout(x) A^T, a part of all
    bool has_gradient = false;
  };
  bool wants(std::size_t call, std::size_t factor) const;
  std::vector<at::Tensor> factors_a() const;

  torch::autograd::AutogradContext* ctx_;
  AdapterCallsPtr calls_;
  std::vector<Part> parts_;
  at::Tensor low_;           ///< as in AdapterForward
  at::Tensor low_gradient_;  ///< like low_; undefined before any gradient
  Places places_{};
};

}  // namespace flatshard::nn
