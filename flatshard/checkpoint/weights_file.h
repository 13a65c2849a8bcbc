#pragma once

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/core/stored_entry.h"
#include "flatshard/group/param_group.h"

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// Writes the main weights of all groups to one safetensors file, under the
/// parameters' names. Collective over the model's mesh: all ranks all-gather,
/// rank 0 writes. At most one group is unsharded in memory at a time. A tied
/// parameter is written once, under its main name. Blocks.
///
/// The file appears under its name only when it is complete.
/// @param entries_of  the file's entries for a parameter, by its unsharded
///   shape; empty: one entry of its name.
/// @param whole  written after the parameters, rank 0's values.
/// @throws Error{io} on the rank that writes.
void save_weights(
    const std::vector<const ParamGroup*>& groups,
    const std::filesystem::path& path,
    const std::map<std::string, std::string>& metadata = {},
    const StoredEntriesOf& entries_of = {},
    const std::vector<WholeTensor>& whole = {});

/// A safetensors file of unsharded tensors that is open for reading.
class WeightsFile {
 public:
  explicit WeightsFile(const std::filesystem::path& path);
  ~WeightsFile();

  /// Fills `out` (any float dtype, CPU or CUDA) with the tensor `name` of the
  /// file. @throws Error{format} when it is missing or of another shape.
  void read(const std::string& name, const at::Tensor& out) const;
  /// The same for an entry. `out` has the shape of the entry.
  void read(const StoredEntry& entry, const at::Tensor& out) const;
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flatshard
