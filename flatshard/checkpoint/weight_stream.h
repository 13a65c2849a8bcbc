#pragma once

#include "flatshard/core/stored_entry.h"
#include "flatshard/device/stream.h"
#include "flatshard/group/param_group.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// Returns the dtype in which the weights of a group leave the model.
using DtypeOf = std::function<at::ScalarType(const ParamGroup&)>;

/// Returns a group's compute dtype: Precision::compute.
at::ScalarType compute_dtype_of(const ParamGroup& group);
/// Returns `dtype` for all groups of floating-point weights. Others, such as
/// integers, keep their own.
DtypeOf dtype_of_weights(at::ScalarType dtype);

/// A tensor of a stream before it is all-gathered.
struct StreamedSpec {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;

  bool operator==(const StreamedSpec&) const = default;
};

struct StreamedTensor {
  std::string name;
  /// Contiguous. It may share memory with the model's weights, so do not write
  /// it. Undefined where WeightStreamOptions::on_rank_0 leaves it out.
  at::Tensor tensor;
};

struct WeightStreamOptions {
  /// Empty: the dtype of main weights.
  DtypeOf dtype_of;
  /// The tensors of a parameter, by its full shape. Empty: one tensor of its
  /// name.
  StoredEntriesOf entries_of;
  /// All ranks that store parts of the parameters. Null: the groups' model
  /// mesh.
  std::shared_ptr<Mesh> mesh;
  /// Parameters with a slice (ParameterPlacement) are assembled only on rank 0
  /// of `mesh`, in host memory.
  bool on_rank_0 = false;
};

/// The full tensors of a sharded model under the names of its files, one group
/// of parameters after another. Nothing in the model changes.
///
/// Weights are read from main weights, in one all-gather for each group: the
/// compute weights are the same values, bit for bit, but may be out of date
/// after a write. A group is not copied if this rank stores all elements on the
/// device in the requested dtype.
///
/// Two groups are unsharded at a time, if the caller frees the tensors of a
/// group before it requests the second group after it. Tensors that are split
/// among ranks by a slice, or that several parameters are rows of, have
/// separate memory.
///
/// Use it between two steps, and on all ranks of the model alike.
class WeightStream {
 public:
  /// @param groups  outlive this.
  /// @throws Error{usage} without groups, for a group without main weights, and
  ///   naming a tensor of which some rows belong to no parameter.
  explicit WeightStream(
      std::vector<const ParamGroup*> groups,
      WeightStreamOptions options = {});
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;
  ~WeightStream();

  /// Returns all tensors in the order of `next`.
  const std::vector<StreamedSpec>& metadata() const { return metadata_; }

  /// All-gathers the next group and returns its tensors; nothing at the end.
  /// Collective. The tensors are ready for the current stream.
  std::optional<std::vector<StreamedTensor>> next();
  /// Starts to all-gather the group after the last one that `next` returned, in
  /// parallel with later work of the current stream. Has no effect on a CPU.
  /// Collective. Call it when the tensors of earlier groups are freed.
  void gather_ahead();

 private:
  /// A tensor of a parameter, or rows of one.
  struct Part {
    StoredEntry entry;
    bool completes = true;  ///< all rows of the tensor are there afterwards
  };
  struct GroupPlan {
    const ParamGroup* group = nullptr;
    at::ScalarType dtype = at::kFloat;
    std::vector<std::vector<Part>> parts;  ///< by parameter
  };
  struct Gathered {
    FlatBuffer values;  ///< all of the group
    Event filled;
  };

  Gathered gather(const GroupPlan& plan) const;
  at::Tensor full_values(
      const GroupParameter& parameter,
      const at::Tensor& mine) const;
  void add_tensors(
      const std::vector<Part>& parts,
      const at::Tensor& values,
      std::vector<StreamedTensor>& to);

  std::vector<GroupPlan> groups_;
  WeightStreamOptions options_;
  std::shared_ptr<Mesh> mesh_;
  std::vector<StreamedSpec> metadata_;
  std::shared_ptr<Stream> stream_;  ///< all-gathers; CPU: the caller's thread
  std::size_t next_ = 0;
  std::optional<Gathered> ahead_;  ///< of group `next_`
  /// Tensors of which some rows were returned by no `next` yet.
  std::map<std::string, at::Tensor> incomplete_;
};

}  // namespace flatshard
