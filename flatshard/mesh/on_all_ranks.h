#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "flatshard/mesh/mesh.h"

namespace flatshard {

/// Runs `work` on every rank and fails on all ranks if it fails on one.
/// Otherwise the others would wait for that rank in the next collective.
/// Collective.
///
/// @param name  of the work in errors and for the watcher: "load checkpoint".
/// @return rank 0's result, on all ranks.
/// @throws what `work` threw on this rank; Error{io} on the others, with the
///   number of a rank that failed.
std::int64_t on_all_ranks(
    Mesh& mesh,
    std::string_view name,
    const std::function<std::int64_t()>& work);

}  // namespace flatshard
