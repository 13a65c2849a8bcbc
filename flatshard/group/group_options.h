#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/group/float8_format.h"
#include "flatshard/group/group_parameter.h"
#include "flatshard/group/precision.h"
#include "flatshard/layout/flat_layout.h"
#include "flatshard/layout/strategy.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/shape/group_plan.h"

namespace flatshard {

/// How a group stores its weights and gradients: the options that a program
/// sets for all groups of a model.
struct ParamGroupOptions {
  Precision precision;
  GradScaling scaling = GradScaling::mean;
  /// Gradients are divided by this as well: for experts, the number of slices.
  /// A gradient that stays in Precision::reduce is divided there.
  double grad_divisor = 1;
  /// Collectives only ever sum: means and divisors are applied afterwards, in
  /// Precision::reduce.
  bool sums_only = false;
  /// The gradient of a step's only reduction stays in Precision::reduce, since
  /// this dtype represents the received values exactly. A second one widens it
  /// to main_grads first. So optimizers must read any dtype, as Flatshard's do.
  bool grads_in_reduce_dtype = false;
  /// false: main weights are cast into the slot before each all-gather and
  /// nothing of compute's dtype is stored in between. Saves its bytes and costs
  /// a pass over the main weights per all-gather. Requires main weights of
  /// another dtype, and weights sharded like the optimizer's (ZeRO-3, on a
  /// single rank too); elsewhere it has no effect. Not with copy engines.
  bool keep_compute_weights = true;
  /// Between a forward and its backward, weights stay sharded among this many
  /// adjacent ranks, e.g. the ranks of a host. They belong to the innermost
  /// axis that weights are sharded on. The backward's all-gather runs only
  /// among them. A divisor of the axis' ranks. Uses 1 / post_forward_ranks of
  /// each unit's weights meanwhile. 0: they stay sharded over all ranks. Where
  /// weights are not sharded it has no effect. See also
  /// UnitPolicy::keep_post_forward.
  std::int64_t post_forward_ranks = 0;
  /// Main weights and reduced gradients are stored in host memory, and so is
  /// the optimizer's state; updates run on the CPU. Compute weights that are
  /// kept stay on the device. Without them each all-gather starts with a copy
  /// of this rank's main weights. Needs no host communication.
  bool offload = false;
  /// With offload, that host memory is pinned, so copies run in parallel with
  /// kernels.
  bool pin_memory = true;
  /// false: the program all-gathers separate values for these parameters. This
  /// group only has their gradients, and allocates no memory for weights.
  bool has_weights = true;
  std::int64_t alignment = kLayoutAlignment;  ///< see FlatLayout::build
  /// The weights are all-gathered as FP8 planes; absent: as Precision::compute.
  /// GroupParameter::float8 sets it for single parameters.
  std::optional<Float8Format> float8 = std::nullopt;

  /// Returns grads_in_reduce_dtype where it has an effect. With offload the
  /// updates wait for nothing on the GPU, so a gradient in main_grads is what
  /// they read.
  bool keeps_reduce_dtype() const { return grads_in_reduce_dtype && !offload; }
};

/// How a sum of gradients becomes what the optimizer reads.
struct GradDivision {
  ReduceOp op = ReduceOp::sum;  ///< of the collectives
  double before = 1;   ///< the addends are divided by it, in the reduce dtype
  double on_wire = 1;  ///< so is the sum, in the reduce dtype
  double at_rest = 1;  ///< and in the dtype that it is kept in
};

/// @param num_ranks  whose gradients are reduced together. float16 has a small
/// range. There collectives sum, and the addends are divided by a power of two
/// near the root of the divisor. So neither these nor the sum leave the range.
/// Source: FSDP2 (torch.distributed.fsdp), with the same factors.
GradDivision grad_division(const ParamGroupOptions& options, int num_ranks);

/// The common properties of a group's weights and gradients.
struct GroupContext {
  std::string name;
  Strategy strategy;  ///< the options decide between sum and average of
                      ///< gradients
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<Mesh> model_mesh;
  bool trainable = true;
  bool peers_read = false;  ///< GroupSpec::peers_read
  ParamGroupOptions options;
  /// The ParamGroup's parameters, in layout order; their names may change.
  const std::vector<GroupParameter>* parameters = nullptr;
  /// GroupPlan(shape_of(context)): what follows from all of the above.
  GroupPlan plan;

  int num_axes() const { return mesh->num_axes(); }
  GradDivision division() const { return grad_division(options, mesh->size()); }
  Placements whole() const {
    return Placements(num_axes(), Placement::replicate());
  }
};

/// Returns the shape of a group as numbers. They determine its layout, planes
/// and storage. Communicates nothing and allocates nothing.
/// @param context  everything but `plan`.
GroupShape shape_of(const GroupContext& context);

}  // namespace flatshard
