#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "flatshard/data/loader.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/optim/optimizer.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/train/config/training_keys.h"
#include "flatshard/train/run/run_checkpoints.h"
#include "flatshard/train/run/run_output.h"

namespace flatshard {

/// Keeps gradients that are not finite out of the weights, by
/// training.on_nonfinite: stop the run, skip the step, or rewind to a
/// checkpoint. To stop, a norm may be looked at some steps later, so that the
/// host does not wait for the device in each.
class NonfiniteGuard {
 public:
  /// The objects that giving up a step touches. All of it must outlive this.
  struct Parts {
    std::shared_ptr<Mesh> mesh;
    std::shared_ptr<Runtime> runtime;
    Optimizer* optimizer = nullptr;
    RunCheckpoints* checkpoints = nullptr;
    data::Loader* loader = nullptr;
    RunOutput* output = nullptr;  ///< null except on rank 0
  };

  NonfiniteGuard(config::OnNonfinite action, Parts parts);

  /// Returns whether the optimizer may use the gradient of `step`; the same on
  /// all ranks.
  /// @param norm  [] float32 on the device: the global gradient norm.
  /// @param now check it and all norms kept before, blocking the host.
  ///   Otherwise, unless the run is to continue after it, it is kept.
  /// @throws Error{usage} when one that was kept is not finite.
  bool accepts(std::int64_t step, const at::Tensor& norm, bool now);

  /// Looks at the norms that were kept: nothing that comes from a gradient that
  /// is not finite is to be saved. Blocks the host.
  /// @param step  the one that is done, for the message.
  /// @throws Error{usage} naming the first step whose gradient is not finite.
  void check_kept(std::int64_t step);

  /// Drops the gradient of `step` after it was rejected. Collective; blocks.
  /// @return the step after which the run continues: `step`, or the step of the
  ///   checkpoint that was loaded, with new data.
  /// @throws Error{usage} naming the parameter, if the run is to stop, has no
  ///   checkpoint yet, or dropped too many steps in a row.
  std::int64_t give_up(std::int64_t step);

 private:
  void rewind(std::int64_t to);

  const config::OnNonfinite action_;  ///< training.on_nonfinite
  const Parts parts_;
  std::int64_t num_given_up_ = 0;  ///< steps in a row
  /// The norms of the steps since the last look at them: [] float32 on the
  /// device each.
  std::vector<std::pair<std::int64_t, at::Tensor>> kept_;
};

}  // namespace flatshard
