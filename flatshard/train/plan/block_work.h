#pragma once

#include "flatshard/plan/job.h"
#include "flatshard/train/plan/attention_work.h"
#include "flatshard/train/plan/layer_kernels.h"
#include "flatshard/train/plan/stages.h"

#include <cstdint>
#include <string>

namespace flatshard {

/// A block: attention and a feed-forward part, or experts.
class BlockWork : LayerKernels {
 public:
  explicit BlockWork(const LayerKernels& kernels)
      : LayerKernels(kernels), attention_(kernels) {}

  plan::LayerWork dense() const;
  plan::LayerWork experts() const;

 private:
  bool is_recomputed() const;
  bool selective() const;
  /// Returns the bytes of a layer that are in host memory from forward to
  /// backward.
  std::int64_t offloaded(const plan::LayerWork& layer) const;
  /// Returns the most that the backward of a dense layer makes.
  /// @param ffn_dim  on this rank.
  std::int64_t dense_transient(std::int64_t ffn_dim) const;
  /// @param whole  width of all ranks.
  Stages gate_up_down(const std::string& module, std::int64_t whole) const;
  Stages mlp_stages() const;
  void with_gathered_over_hosts(plan::LayerWork& layer) const;

  AttentionWork attention_;
};

}  // namespace flatshard
