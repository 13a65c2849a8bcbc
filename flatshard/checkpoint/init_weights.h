#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "flatshard/core/stored_entry.h"
#include "flatshard/format/hf_folder.h"
#include "flatshard/group/param_group.h"

namespace flatshard {

struct InitWeightsOptions {
  /// Returns the folder's entries for a parameter, by its unsharded shape. A
  /// tied parameter is looked up under each of its names, the main one first.
  StoredEntriesOf entries_of;
  /// See HfFolder.
  std::string base_prefix;
  std::string file_name{kHfSingleName};
  /// Whether a tensor that belongs to no parameter changes nothing: any other
  /// is an error. Empty: none may be there.
  std::function<bool(const std::string& name, std::size_t num_dims)> unneeded;
  /// Shell patterns over names of tensors in the folder, as `entries_of` has
  /// them: these are not used, and parameters of one keep their values.
  std::vector<std::string> exclude;
};

/// The parts of a folder that the weights were not made of; the same on all
/// ranks.
struct UnusedWeights {
  /// Tensors and files, by name.
  std::vector<std::string> names;
  /// Second names of tied parameters whose stored values differ from the values
  /// that were read (under the first name). Checked on rank 0.
  std::vector<std::string> other_values;
};

/// Fills the main weights of this rank from a Hugging Face folder of any float
/// dtypes. Each rank reads what it owns in pieces, so no rank ever stores the
/// full model. Each of num_upload_threads(ranks) threads has two pieces of 8
/// MiB of host memory, and one on a GPU. Optimizer state is unchanged. Blocks.
/// Collective if ranks read each other's weights (copy all-gathers).
///
/// Names, shapes and dtypes are checked before the first weight changes.
/// @throws Error{io} or Error{format} naming the tensor: missing from the
/// folder, of another shape, or one too many in it.
UnusedWeights init_weights(
    const std::filesystem::path& folder,
    const std::vector<ParamGroup*>& groups,
    const InitWeightsOptions& options);

}  // namespace flatshard
