#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "flatshard/group/plane_writer.h"
#include "flatshard/optim/parameter_values.h"
#include "flatshard/optim/state_format.h"
#include "flatshard/optim/stochastic_rounding.h"
#include "flatshard/optim/update_step.h"

namespace flatshard {

/// One state of a flat shard, by format. Undefined: no range has the format.
struct StateTensors {
  at::Tensor float32;
  at::Tensor bfloat16;
  at::Tensor codes;   ///< int8: exp_avg; uint8: exp_avg_sq
  at::Tensor scales;  ///< float32, one for each kStateBlock codes
};

/// One optimizer update of one flat shard: reads main weights, gradient and
/// state, writes main weights, compute weights and state in one pass.
struct FlatUpdate {
  at::Tensor main;     ///< [n] weights that are updated
  at::Tensor compute;  ///< [n] rounded copy; undefined when main serves
  at::Tensor grad;     ///< [n] any float dtype
  at::Tensor state0;   ///< [n] float32: exp_avg, or momentum (may be undefined)
  at::Tensor state1;   ///< [n] float32: exp_avg_sq (AdamW)
  /// [] float32 on the same device, multiplied into the gradient; undefined
  /// for 1. A device value, so clipping needs no host wait.
  at::Tensor grad_scale;
  /// The scalars of each parameter group.
  std::vector<UpdateRow> rows;
  /// Ascending and complete: the last `end` is n. Empty: all elements have
  /// the first row.
  std::vector<UpdateRange> ranges;
  /// Set: the states have only these runs, and no other elements are updated.
  std::optional<std::vector<UpdateRun>> runs;
  /// Returns where the states have element `local_offset` of the shard.
  std::int64_t states_offset(std::int64_t local_offset) const;
  /// Returns the number of elements of each state.
  std::int64_t states_numel(std::int64_t shard_numel) const;
  /// CUDA with ranges: the bytes of `ranges` and of `rows`.
  at::Tensor device_ranges;
  at::Tensor device_rows;
  PlaneWriter planes;  ///< AdamW only

  /// AdamW: exp_avg and exp_avg_sq in these formats, instead of state0 and
  /// state1. Ascending and complete; of several ranges, and with int8, each
  /// ends at a multiple of kStateBlock, and so do `ranges`. Empty: not used.
  std::vector<StateRange> state_ranges;
  StateTensors exp_avg;
  StateTensors exp_avg_sq;
  /// bfloat16 main weights are rounded stochastically. Ascending and complete.
  /// Empty: to nearest even.
  std::vector<RoundingRange> rounding_ranges;
  std::uint64_t rounding_step = 0;
  /// CUDA: the bytes of both.
  at::Tensor device_state_ranges;
  at::Tensor device_rounding_ranges;

  /// Copies all ranges to where kernels read them.
  void upload_ranges(at::Device device);
};

/// Returns the bytes of `rows` on a CUDA device. Queues on the current stream
/// and does not block the host.
at::Tensor upload_rows(const std::vector<UpdateRow>& rows, at::Device device);

/// Updates a flat shard by the rule of an algorithm, see update_rules.h. Queues
/// on the current CUDA stream, or runs on the host. float32 arithmetic.
void flat_update(Algorithm algorithm, const FlatUpdate& update);

/// The CUDA half; in a build without CUDA it throws Error{config}.
void flat_update_cuda(Algorithm algorithm, const FlatUpdate& update);

}  // namespace flatshard
