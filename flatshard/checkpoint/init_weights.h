#pragma once

#include <filesystem>
#include <vector>

#include "flatshard/core/stored_entry.h"
#include "flatshard/group/param_group.h"

namespace flatshard {

/// Fills the main weights of this rank from a Hugging Face folder, whatever
/// float dtype it has. Each rank reads what it owns, a piece at a time: no rank
/// ever holds the model. Host memory grows by a piece of 64 MiB, and by one
/// more where a GPU's weights have another dtype than the folder. Optimizer
/// state stays. Blocks. Collective where ranks read each other's weights (copy
/// gathers).
///
/// Names, shapes and dtypes are checked before the first weight changes.
/// @param entries_of  what the folder has of a parameter, by its whole shape; a
///   tied parameter is looked for under each of its names.
/// @throws Error{io} or Error{format} naming the tensor: missing from the
/// folder, of another shape, or one too many in it.
void init_weights(
    const std::filesystem::path& folder,
    const std::vector<ParamGroup*>& groups,
    const StoredEntriesOf& entries_of);

}  // namespace flatshard
