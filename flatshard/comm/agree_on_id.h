#pragma once

#include <string>

#include "flatshard/comm/communicator.h"

namespace flatshard {

/// Returns the same random hexadecimal name on every rank of the group, for
/// what they make together. Collective; blocks the host.
std::string agree_on_id(Communicator& group);

}  // namespace flatshard
