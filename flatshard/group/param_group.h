#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/group/gradient_pipeline.h"
#include "flatshard/group/group_options.h"
#include "flatshard/group/group_parameter.h"
#include "flatshard/group/initializer.h"
#include "flatshard/group/named_shard.h"
#include "flatshard/group/weight_planes.h"

#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// Properties of a group that are not the program's choices
/// (ParamGroupOptions).
struct GroupSpec {
  std::string name;                        ///< for messages, e.g. the unit name
  std::vector<GroupParameter> parameters;  ///< at least one
  std::shared_ptr<Mesh> mesh;
  Strategy strategy;  ///< for the axes of `mesh`
  /// The mesh of the full model, possibly larger than the group's: norms,
  /// checkpoints and exports count over it. Null: the group's own.
  std::shared_ptr<Mesh> model_mesh = nullptr;
  bool trainable = true;
  /// Compute weights are stored where the copy engines of the other ranks read
  /// them: see WeightPlanes::Gather::from_peers. Requires all ranks on one
  /// host. Where weights are not sharded it has no effect.
  bool peers_read = false;
};

/// The parameters of one unit that share dtype, trainability, mesh and
/// strategy: their names, their storage, and their weights and gradients. A
/// frozen group has no gradients.
class ParamGroup {
 public:
  ParamGroup(
      GroupSpec spec,
      ParamGroupOptions options,
      const Initializer& initializer);
  /// A copy would share the memory and not what is known of it.
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  WeightPlanes& weights() { return *weights_; }
  const WeightPlanes& weights() const { return *weights_; }
  GradientPipeline& gradients() { return gradients_; }
  const GradientPipeline& gradients() const { return gradients_; }

  const std::string& name() const { return context_.name; }
  const Strategy& strategy() const { return context_.strategy; }
  const ParamGroupOptions& options() const { return context_.options; }
  /// Returns all that follows from the group's shape.
  const GroupPlan& plan() const { return context_.plan; }
  const FlatLayout& layout() const { return *context_.plan.layout; }
  const std::vector<GroupParameter>& parameters() const { return parameters_; }
  const std::shared_ptr<Mesh>& mesh() const { return context_.mesh; }
  /// Returns the full model's mesh.
  const std::shared_ptr<Mesh>& model_mesh() const {
    return context_.model_mesh;
  }
  /// From now on, communicates through the model's mesh `mesh` and through the
  /// group's part of it. It has the axes of the one before (Mesh::same_as).
  /// Call it while neither an all-gather nor a reduction runs.
  void use_model_mesh(std::shared_ptr<Mesh> mesh);
  bool trainable() const { return context_.trainable; }

  /// Sets the name for messages.
  void set_name(std::string name) { context_.name = std::move(name); }
  /// The main name first. The layout keeps the names it was built with.
  void set_names(std::int64_t parameter, std::vector<std::string> names);
  /// Sums gradients and divides them by `divisor` instead of the number of
  /// ranks, from the next reduction on. Equal on all ranks.
  /// @throws Error{config} when divisor <= 0.
  void set_divisor(double divisor);
  /// ParamGroupOptions::sums_only, from the next reduction on. Equal on all
  /// ranks.
  void set_sums_only(bool sums_only);
  /// From now on checkpoints do not depend on the parameter. It keeps its
  /// place.
  void drop(std::int64_t parameter) {
    parameters_.at(parameter).dropped = true;
  }
  /// Places the parameter among ranks outside the model's mesh, as in Python's
  /// tensor parallelism: it is `slice` of a tensor that all of them share. The
  /// ranks of `outside` have the same slice of it. Checkpoints contain that
  /// tensor.
  /// @throws Error{config} when the parameter cannot be this slice.
  void set_part(std::int64_t parameter, TensorSlice slice, Replicas outside);

  /// GradientPipeline::plan. A reduction of all ranks also marks that their
  /// copies of the weights are over.
  GradientPipeline::Reduction plan_reduction(bool collective, bool is_last);

  /// The ranks of the model's mesh that store the same elements of the main
  /// weights.
  Replicas replicas() const;
  /// Returns this rank's part of each parameter, in the main weights.
  std::vector<NamedShard> main_shards() const;
  /// Returns the same runs of another flat tensor of their size, e.g. an
  /// optimizer state or the gradient.
  std::vector<NamedShard> shards_of(const at::Tensor& flat) const;

 private:
  void use_division();
  void check_slices() const;
  void check_float8() const;
  void initialize(const Initializer& initializer);

  std::vector<GroupParameter> parameters_;
  GroupContext context_;
  std::unique_ptr<WeightPlanes> weights_;
  GradientPipeline gradients_{context_};
};

/// @throws Error{config} naming `unit` unless all encoded weights of its groups
///   have the same encoding: a plane is the same in each group that has it.
void check_same_encoding(
    const std::string& unit,
    const std::vector<std::unique_ptr<ParamGroup>>& groups);

}  // namespace flatshard
