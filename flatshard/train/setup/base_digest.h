#pragma once

#include "flatshard/group/param_group.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flatshard {

/// A 64-bit digest of each parameter, by its main name: of its values rounded
/// to bfloat16, for any dtype and grid of ranks. It distinguishes base models
/// and is not a cryptographic hash.
using WeightDigests = std::map<std::string, std::uint64_t>;

/// Returns the digests of the main weights of `groups`. Collective; blocks.
WeightDigests digest_weights(const std::vector<ParamGroup*>& groups);

/// Returns the digest of an unsharded tensor.
std::uint64_t digest_of(const at::Tensor& values);

/// Returns text for a checkpoint's manifest, and back.
std::string to_json(const WeightDigests& digests);
/// @throws Error{format} naming `origin`.
WeightDigests parse_digests(const std::string& text, const std::string& origin);

}  // namespace flatshard
