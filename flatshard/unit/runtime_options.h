#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/unit/debug_options.h"
#include "flatshard/unit/graph_options.h"

namespace flatshard {

/// Which gathers are copies that each rank makes of its peers' weights by
/// itself (WeightPlanes::Gather::copies). On GPUs copy engines do them, and
/// leave the SMs to what computes.
///
/// A copy takes no peer's doing, so nothing but a later collective tells a rank
/// that its weights were read: a backward's reductions do, and where there were
/// none (after an evaluation) WeightPlanes::wait_for_readers. Optimizers and
/// checkpoints call it before they write; whoever else writes weights does,
/// too.
enum class CopyGathers { none, forward, all };

struct RuntimeOptions {
  int prefetch = 1;
  bool reshard_after_forward = true;
  /// Other than none: the groups have ParamGroupOptions::peers_read_weights.
  CopyGathers copy_gathers = CopyGathers::none;
  /// Weights are written by others, who do not call
  /// WeightPlanes::wait_for_readers: a forward without a backward ends when no
  /// peer copies weights any more.
  bool others_write = false;
  /// Each gather and each reduction allocates its slot and frees it afterwards,
  /// instead of a plan giving it a place in one arena that is there all the
  /// time. Addresses change from step to step; the end of a forward, where
  /// activations and logits are at their largest, holds no slot of a gradient.
  bool slots_on_demand = false;
  /// A group of which no rank got a gradient in a backward has none after it,
  /// as parameters of torch have. Otherwise, and where another rank got one, a
  /// rank without a gradient counts zeros. Costs an all-reduce of a flag for
  /// each group at the end of a backward; the host waits for it only where this
  /// rank got none for a group.
  bool unused_grads_stay_undefined = false;
  /// Delays for tests; the names of the streams are part of the seed.
  StreamOptions streams;
  /// Keep every event and action since the last clear_trace (tests, reports).
  bool trace = false;
  DebugOptions debug;
  GraphOptions graphs;
};

}  // namespace flatshard
