#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "flatshard/layout/flat_layout.h"

namespace flatshard {

/// Most models stay far below it.
inline constexpr double kDefaultMaxPadding = 0.05;

/// Padding of no more bytes than this on a rank is accepted in any case: the
/// ratio means nothing for small models.
inline constexpr std::int64_t kNegligiblePaddingNbytes = 64LL << 20;

/// Describes the padding of a model if it is significant: more than
/// `max_padding` of the model's elements and more than `negligible_nbytes` on a
/// rank. Names the tensor that is hardest to split and the largest number of
/// shards with acceptable padding.
///
/// @param layouts  of all groups of parameters.
/// @param element_nbytes  of the main weights.
/// @param name_of  the name of a tensor of a layout; it may have changed
///   since the layout was built. Null: the name in the layout.
/// @throws Error{config} for a negative max_padding.
std::optional<std::string> describe_excessive_padding(
    std::span<const FlatLayout* const> layouts,
    double max_padding,
    std::int64_t element_nbytes = 4,
    std::int64_t negligible_nbytes = kNegligiblePaddingNbytes,
    const std::function<std::string(const FlatLayout&, std::int64_t)>& name_of =
        nullptr);

/// @throws Error{config} with that description.
void check_padding(
    std::span<const FlatLayout* const> layouts,
    double max_padding);

}  // namespace flatshard
