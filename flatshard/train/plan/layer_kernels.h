#pragma once

#include "flatshard/models/activation_checkpoint.h"
#include "flatshard/models/config.h"
#include "flatshard/plan/job.h"
#include "flatshard/train/config/lora_keys.h"
#include "flatshard/train/config/parallelism_keys.h"
#include "flatshard/train/config/training_keys.h"
#include "flatshard/train/plan/stages.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace flatshard {

/// The keys of a run that the work of its layers depends on.
struct WorkOptions {
  config::Training training;  ///< resolved
  config::Parallelism parallelism;
  config::Lora lora;
  at::ScalarType compute = at::kFloat;
  at::ScalarType reduce = at::kFloat;
  models::ActivationCheckpoint recompute = models::ActivationCheckpoint::none;
  std::optional<std::int64_t> recomputed_layers;  ///< unset: all
  bool keeps_attention = false;                   ///< where it is recomputed
  bool offloads = false;  ///< what a recomputed part keeps, to the host
  /// Tokens of a rank in one run of the feed-forward part; 0: all.
  std::int64_t mlp_chunk_tokens = 0;
  /// Tokens of a rank whose logits exist at once; 0: all.
  std::int64_t loss_chunk_tokens = 0;
};

/// Adds the kernels of a layer's parts to the work of a node, and counts the
/// bytes that they keep. Both are of one microbatch of a rank.
class LayerKernels {
 public:
  /// @param options, model, float8, adapted  see add_model_work; they outlive
  ///   this object.
  /// @param copies  see Job::copy_activations.
  LayerKernels(
      const WorkOptions& options,
      const models::ModelConfig& model,
      std::int64_t layer,
      const std::map<std::string, std::string>& float8,
      const std::set<std::string>& adapted,
      bool copies);

 protected:
  static double d(std::int64_t n) { return static_cast<double>(n); }

  /// Returns the bytes of `width` numbers for each token.
  std::int64_t bytes(std::int64_t width) const {
    return tokens_ * width * static_cast<std::int64_t>(size_);
  }
  std::int64_t rows_of_floats(std::int64_t width) const {
    return tokens_ * width * static_cast<std::int64_t>(sizeof(float));
  }
  /// Returns the same for the tokens that a rank has between the layers.
  std::int64_t own_bytes(std::int64_t width) const {
    return bytes(width) / sharing_;
  }
  std::int64_t own_rows_of_floats(std::int64_t width) const {
    return rows_of_floats(width) / sharing_;
  }

  /// Adds the kernels of a linear layer [rows, in] -> [rows, out]. In FP8 its
  /// gradient is quantized, and its input once more for the weight's gradient.
  /// @param module  of a layer; empty for the head, because it is never FP8.
  void product(
      plan::NodeWork& node,
      const std::string& module,
      std::int64_t rows,
      std::int64_t out,
      std::int64_t in,
      bool has_input_gradient = true) const;
  std::string weight_of(const std::string& module) const;
  bool has_adapter(const std::string& module) const;
  /// Adds the adapter of a layer [rows, k] -> [rows, n], as nn::AdapterForward
  /// and nn::AdapterBackward compute it.
  void adapter(
      plan::NodeWork& node,
      double rows,
      double n,
      double k,
      bool has_input_gradient) const;
  /// Returns the bytes that autograd saves for the adapters of these layers.
  std::int64_t adapters_saved(
      std::initializer_list<std::string_view> modules) const;
  /// Adds the matmuls of `groups` experts [m, in] -> [m, out].
  void grouped(
      plan::NodeWork& node,
      double groups,
      double m,
      std::int64_t out,
      std::int64_t in) const;
  /// Adds a norm of the tokens that a rank has between the layers.
  /// @param with_delta  adds a residual first.
  void norm(plan::NodeWork& node, bool with_delta) const;
  /// Adds silu(gate) * up of rows of `width` numbers.
  void swiglu(plan::NodeWork& node, std::int64_t rows, std::int64_t width)
      const;
  /// Appends stages that follow each other, with their exchanges.
  void put_together(const Stages& stages, plan::NodeWork& node) const;
  /// Returns the width that a norm saves per token, including what layers save
  /// to all-gather its result again.
  std::int64_t norm_width() const {
    return (sharing_ > 1 ? 2 : 1) * model_.dim;
  }
  /// @param chunk  tokens; 0: all.
  static double num_chunks(std::int64_t tokens, std::int64_t chunk);

  const WorkOptions& options_;
  const models::ModelConfig& model_;
  std::int64_t layer_;
  const std::map<std::string, std::string>& float8_;
  const std::set<std::string>& adapted_;
  bool frozen_;           ///< all weights but adapters
  double size_;           ///< bytes per element of activations
  std::int64_t sharing_;  ///< ranks of tensor parallelism
  std::int64_t context_;  ///< ranks of context parallelism on a host
  std::int64_t hosts_;    ///< that share sequences
  std::int64_t tokens_;   ///< per microbatch, shared by ranks of the former
  std::int64_t own_tokens_;
  bool copies_;  ///< ranks that share layers copy activations
};

}  // namespace flatshard
