#pragma once

#include "flatshard/fully_shard/unit_contents.h"
#include "flatshard/runtime/runtime.h"
#include "python/csrc/bind.h"

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace flatshard::python {

/// One unit as Python sees it: first separate, then as part of a Runtime.
/// Parameters have the order of `Unit::parameters`.
class PyUnit {
 public:
  /// One parameter to shard.
  struct Member {
    std::string name;
    /// The tensor that modules compute with: GroupParameter::tensor.
    at::Tensor whole;
    at::Tensor values;  ///< as they are stored
    /// Absent: the parameter's own, as for tensors of which nothing is
    /// computed: integers, bool, float8.
    std::optional<at::ScalarType> compute_dtype;
    at::ScalarType reduce_dtype = at::kFloat;  ///< of gradients on the wire
    bool float8 = false;                       ///< it is gathered as FP8
    bool trainable = true;
    std::int64_t apart = 0;  ///< GroupParameter::apart
    bool has_weights = true;
    bool float32_states = false;  ///< see kStateDtypeAttribute
    /// dim0: split between slices along the first dimension, as a DTensor can
    /// express; chunk: as torch.chunk; tensor: never split.
    Granularity granularity;
  };

  /// dim, size of the larger tensor, and the indices [start, end).
  using Cut =
      std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

  struct Options {
    std::string strategy;  ///< see Strategy::named
    /// Its precision (each parameter has one) and keep_compute_weights are not
    /// set.
    ParamGroupOptions group;
    /// Some layers call PyRuntime::linear.
    bool grads_in_place = false;
    /// The peers' copy engines read compute weights, so these are kept.
    bool peers_read = false;
    /// The format of the members that are FP8.
    std::optional<Float8Format> float8;
    /// Shards consist of full blocks, as int8 optimizer states require. Absent:
    /// where that costs almost no padding.
    std::optional<bool> int8_states;
    /// The mesh on which the members are stored, a part of the unit's mesh;
    /// null: all of it.
    std::shared_ptr<Mesh> part;
    /// The number of slices when `part` is set: each rank's members are slice
    /// `which` of `number` equal ones of larger tensors, along dimension 0.
    std::int64_t number_of_slices = 1;
    std::int64_t which_slice = 0;
  };

  PyUnit(
      const std::vector<Member>& members,
      const std::shared_ptr<Mesh>& mesh,
      Options options);

  std::int64_t num_parameters() const {
    return static_cast<std::int64_t>(places_.size());
  }
  const at::Tensor& whole(std::size_t i) const { return wholes_.at(i); }
  bool trainable(std::size_t i) const { return group(i).trainable(); }
  std::size_t group_index(std::size_t i) const { return places_.at(i).group; }
  std::int64_t index_in_group(std::size_t i) const {
    return places_.at(i).index;
  }
  std::size_t num_groups() const { return groups_.size(); }
  ParamGroup& group_at(std::size_t g) const { return *groups_.at(g); }
  /// @throws Error{config} where shards were not laid out for int8 states,
  ///   naming the reason.
  void check_int8_states() const;

  /// [rows, ...] this rank's slices of parameter i inside `flat`, a tensor with
  /// the layout of the main weights. Shares its memory.
  at::Tensor rows_of(std::size_t i, const at::Tensor& flat) const;
  /// Returns the same of a tensor with another layout, from element `begin` on.
  at::Tensor rows_at(std::size_t i, const at::Tensor& flat, std::int64_t begin)
      const;
  at::Tensor shard(std::size_t i) const;
  /// Returns nothing before the first reduction since the gradients were
  /// dropped.
  std::optional<at::Tensor> grad(std::size_t i) const;
  /// Returns where the shards of parameter i start along its first dimension,
  /// and the end; empty: every rank has all of it.
  std::vector<std::int64_t> cuts(std::size_t i) const;
  /// Returns the shard of parameter i that each rank of the mesh stores; ranks
  /// by their coordinates, the last axis fastest.
  std::vector<std::int64_t> shard_of_ranks(std::size_t i) const;

  /// ParamGroup::set_part of parameter i. Without `cuts` its slice stays.
  void set_part(
      std::size_t i,
      const std::optional<std::vector<Cut>>& cuts,
      Replicas outside);

  /// Appends the members of `other` to the members of this one, in separate
  /// groups. Before `adopt` of either; nothing is left in `other`.
  void join(PyUnit& other);

  /// Some layers call PyRuntime::linear. Before `adopt`.
  void write_grads_in_place() { grads_in_place_ = true; }

  void set_names(
      const std::string& unit,
      const std::vector<std::vector<std::string>>& names);
  /// Sets the error of reading `whole(i)`, or a view of it, while it has no
  /// memory. After set_names, before `adopt`.
  void set_access_error(std::size_t i, const std::string& text) const {
    contents_.parameters.at(i).storage.set_access_error(text);
  }
  /// Hands the contents to a Unit of a Runtime; `this` keeps reading them.
  std::unique_ptr<Unit> adopt(UnitId id);
  void keep(std::shared_ptr<Runtime> runtime) {
    runtime_ = Released<Runtime>(std::move(runtime));
  }

 private:
  struct PlaceInGroup {
    std::size_t group;
    std::int64_t index;
    /// This rank's rows in the group's main weights.
    std::int64_t offset = 0;
    std::vector<std::int64_t> shape{};
    /// Where it has no rows: an address that no other parameter has.
    std::shared_ptr<char> nowhere{};
  };
  void find_rows(PlaceInGroup& place) const;
  ParamGroup& group(std::size_t i) const {
    return *groups_[places_.at(i).group];
  }
  static bool is_whole(const ParamGroup& group);

  UnitContents contents_;
  std::vector<ParamGroup*> groups_;
  std::vector<PlaceInGroup> places_;
  std::vector<at::Tensor> wholes_;
  std::string name_ = "unit";
  std::optional<bool> int8_states_;
  /// The member with slices that many blocks would have to share.
  std::optional<std::size_t> odd_member_;
  bool adopted_ = false;
  bool grads_in_place_;
  Released<Runtime> runtime_;  ///< owns the groups once adopted
};

/// Returns the groups of the units, in their order.
std::vector<ParamGroup*> groups_of(
    const std::vector<std::shared_ptr<PyUnit>>& units);
/// Returns the groups among them that are trained.
std::vector<ParamGroup*> trainable_groups_of(
    const std::vector<std::shared_ptr<PyUnit>>& units);

}  // namespace flatshard::python
