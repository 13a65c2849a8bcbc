#pragma once

#include "flatshard/group/group_options.h"

namespace flatshard {

/// Returns the axis of a group's mesh whose adjacent ranks have a full copy of
/// the weights from forward to backward: the innermost one that shards weights
/// over several ranks.
/// @param context  with post_forward_ranks; everything but `plan`.
/// @throws Error{config} if the option does not fit the group.
int post_forward_axis(const GroupContext& context);

}  // namespace flatshard
