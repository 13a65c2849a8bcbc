#pragma once

#include "flatshard/schedule/plane_set.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {

using UnitId = int;
/// One forward of one unit. A unit that is called twice has two calls.
using CallId = std::int64_t;
/// One run of the autograd engine; nested backwards have separate ids.
using TaskId = std::int64_t;

inline constexpr UnitId kNoUnit = -1;

/// The purpose of unsharded weights. A recompute is part of the backward.
enum class Phase { forward, backward };

/// A program's choices for one unit. They may change between two steps.
struct UnitPolicy {
  bool reshard_after_forward = true;
  /// false: the weights stay unsharded after the backward too, until they
  /// change or a `reshard` event arrives.
  bool reshard_after_backward = true;
  /// false: no kernel of the backward reads the weights, so they are not
  /// all-gathered for it.
  bool unshard_in_backward = true;
  /// Units to unshard ahead instead of the predicted ones.
  std::optional<std::vector<UnitId>> forward_prefetch;
  std::optional<std::vector<UnitId>> backward_prefetch;
  /// Planes that only the backward reads stay unsharded after the backward,
  /// until the weights change: later microbatches neither all-gather nor derive
  /// them again.
  bool keep_backward_planes = false;
  /// If it is resharded after forward, the unit keeps UnitSpec::post_forward,
  /// where it has one. false: it is resharded over all ranks.
  bool keep_post_forward = true;
  /// false: the unit's gradients are added up on this rank, without a
  /// collective, and join a later backward that synchronizes them.
  bool sync_gradients = true;
  /// false: no backward counts as the step's last for the unit: gradients are
  /// not reduced over axes where they stay unreduced between microbatches.
  bool all_reduce = true;

  bool operator==(const UnitPolicy&) const = default;
};

/// The Scheduler's description of a unit. Bytes are the slots' bytes.
struct UnitSpec {
  std::string name;
  UnitId parent = kNoUnit;  ///< the enclosing unit
  /// For each plane, the size of its slot. 0: it is never unsharded. Empty: no
  /// plane is.
  std::vector<std::int64_t> weights_nbytes;
  std::int64_t grad_nbytes = 0;  ///< 0: no trainable parameter
  /// The planes that kernels of the forward read. A recompute is one.
  PlaneSet forward_reads = PlaneSet::all();
  /// The planes that kernels of the backward read. If a part of the unit is
  /// recomputed in its backward, that part's planes are among them. All of them
  /// stay until the unit's backward has finished.
  PlaneSet backward_reads = PlaneSet::all();
  /// For each plane, the lower-numbered plane that each rank derives it from,
  /// once that one is unsharded. kStored, or no entry: it is all-gathered.
  std::vector<PlaneId> derived_from;
  /// For each plane, the bytes of its parts, as many as its source plane has.
  /// No entry, or an empty one: it is only all-gathered as one piece.
  std::vector<std::vector<std::int64_t>> part_nbytes;
  GatherParts gather_parts = GatherParts::recomputed;
  /// Planes that kernels request (EventKind::read). Compute waits for them only
  /// then, and the reads of a recompute are recorded for the next one.
  PlaneSet on_request;
  /// The weights stay unsharded (ZeRO-1 and ZeRO-2): all-gathered once after
  /// each change of the weights, never resharded.
  bool resident = false;
  /// The plane with this rank's slice of plane 0 between a forward and its
  /// backward: derived from plane 0 when that is resharded, and the source of
  /// plane 0's all-gather as long as it exists. No kernel reads it. kNoPlane:
  /// plane 0 is always all-gathered from the stored shards.
  PlaneId post_forward = kNoPlane;
  /// Planes that are resharded even if the unit is resident, such as planes
  /// that are derived from stored ones. They have no parts.
  PlaneSet transient;
  UnitPolicy policy;
  /// Gradients are stored sharded (ZeRO-2 and ZeRO-3): every microbatch
  /// reduces. Otherwise only the last one does and the others accumulate
  /// locally.
  bool reduce_every_microbatch = true;
  /// Layers write gradients into the slot while the backward runs. Otherwise
  /// they arrive as tensors, and the slot is needed from the reduction on.
  bool grads_in_place = true;

  bool operator==(const UnitSpec&) const = default;

  /// Returns the `planes` that `phase` reads.
  PlaneSet reads(Phase phase) const {
    return planes() &
           (phase == Phase::forward ? forward_reads : backward_reads);
  }
  /// Slices that are never resharded.
  PlaneSet resting() const {
    return resident ? PlaneSet::all() - transient : PlaneSet();
  }
  /// Returns the planes that are ever unsharded, or derived from such ones.
  PlaneSet planes() const {
    PlaneSet planes;
    for (std::size_t plane = 0; plane < weights_nbytes.size(); ++plane) {
      if (weights_nbytes[plane] > 0) {
        planes.insert(static_cast<PlaneId>(plane));
      }
    }
    return planes;
  }

  /// Returns the number of a plane's part among the planes and parts of the
  /// unit: the plane's own number for kWhole.
  PlaneId slice(PlaneId plane, PartId part) const;
  struct PlanePart {
    PlaneId plane = 0;
    PartId part = kWhole;
  };
  /// Returns the inverse.
  PlanePart plane_part(PlaneId slice) const;
  int num_slices() const;
  int num_parts(PlaneId plane) const {
    const auto p = static_cast<std::size_t>(plane);
    return p < part_nbytes.size() ? static_cast<int>(part_nbytes[p].size()) : 0;
  }
  /// Returns the plane's parts; empty where it has none.
  PlaneSet parts(PlaneId plane) const;
  /// Returns the slice that this one is derived from, or kStored.
  PlaneId source(PlaneId slice) const;
  std::int64_t nbytes(PlaneId plane, PartId part) const {
    return part == kWhole ? weights_nbytes[plane] : part_nbytes[plane][part];
  }
};

enum class EventKind {
  forward_begin,
  forward_end,
  recompute_begin,
  recompute_end,
  task_begin,
  backward_begin,
  wgrad_done,
  wgrad_deferred,  ///< gradients of `unit` that come after its inputs'
                   ///< gradients
  inputs_done,
  task_end,
  read,       ///< a kernel of `unit` is to read `part` of `plane`
  kept_read,  ///< kernels are to read what `call` kept (kept_nbytes)
  kept_done,  ///< later kernels do not read it
  weights_changed,
  unit_written,  ///< weights of `unit`, inside a forward around it
  unshard,       ///< unshard now; the next forward, backward or reshard frees
  reshard,       ///< reshard, unless a forward or backward of the unit is open
  microbatch,
  reset,
};

/// Something that happened in the training program. Plain data, so that a
/// recorded step can be replayed and a test can write one down.
struct ScheduleEvent {
  EventKind kind{};
  UnitId unit = kNoUnit;
  CallId call = -1;
  TaskId task = -1;
  /// read: what is read.
  PlaneId plane = 0;
  PartId part = kWhole;
  /// forward_end: a backward can follow.
  bool needs_backward = false;
  /// forward_end: other modules of the unit are to run in this forward, or
  /// another microbatch's forward of it, with the same unsharded weights.
  bool more_follow = false;
  /// forward_end: bytes that the call keeps for its backward, to be stored in
  /// host memory in between. 0: nothing leaves the device.
  std::int64_t kept_nbytes = 0;
  /// backward_begin: this backward makes a separate graph (create_graph) that
  /// reads the weights: they stay until they change.
  bool makes_graph = false;
  /// backward_begin: some input needs a gradient, inputs_done will follow.
  bool waits_for_inputs = false;
  /// wgrad_deferred: how many, each to end with a separate wgrad_done.
  int count = 0;
  /// wgrad_done: it is one of those.
  bool deferred = false;
  /// task_end: no other backward is running around this one.
  bool outermost = false;
  /// task_begin: until this backward ends, the forward of another microbatch
  /// may continue between its events. The backward of that one runs later.
  bool interleaved = false;
  /// task_end: units whose gradients of earlier microbatches are not reduced
  /// over all ranks yet; the step's last backward finishes them too.
  std::vector<UnitId> unfinished;
  /// unshard: compute waits for the weights.
  bool awaits = true;
  /// unshard: the program requested the weights, and may write them next.
  bool by_program = false;
  /// microbatch: this backward is the step's last; gradients are synchronized.
  bool is_last = true;
  bool sync = true;
  /// task_begin: for each unit, how many parameters will get a gradient.
  std::vector<std::pair<UnitId, int>> expected;
  /// task_begin: how many calls of which units will start their backward. The
  /// same on all ranks, whichever parameters get gradients: a unit that is
  /// called again is neither reduced nor resharded in between.
  std::vector<std::pair<UnitId, int>> calls;
  /// task_begin: false when the caller chose what gets gradients and no
  /// parameter is among it (the same on all ranks): nothing is reduced.
  bool reduces = true;

  bool operator==(const ScheduleEvent&) const = default;
};

}  // namespace flatshard
