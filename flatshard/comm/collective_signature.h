#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "flatshard/comm/collective_log.h"

namespace flatshard {

/// A description of a collective: all ranks of a group must agree on it.
struct CollectiveSignature {
  CollectiveKind kind{};
  /// Elements of the larger side, summed over the tensors of one launch. For an
  /// all-to-all the elements of one row: ranks may differ in the number of
  /// rows.
  std::int64_t numel = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
  /// The ReduceOp of a reduction, the root of a broadcast, else 0.
  int detail = 0;
  /// Its purpose, e.g. "layers.7"; empty if none was set.
  std::string unit;

  bool operator==(const CollectiveSignature&) const = default;
};

/// One rank's part in a collective.
struct IssuedCollective {
  int rank = 0;  ///< as messages name it
  std::int64_t step = 0;
  CollectiveSignature signature;
};

/// The end of a message about ranks that diverge, with the remedy.
inline constexpr char kSameUnitsOnAllRanks[] =
    "all ranks must run the same units in the same order, with equal sizes and "
    "dtypes. A rank that does not need a unit runs it all the same and adds "
    "its output times zero to the loss, or, where there is no backward, calls "
    "unshard() and reshard() of the unit";

/// E.g. "all_gather of 4096 Float".
std::string describe(const CollectiveSignature& signature);
/// E.g. "step 3, unit layers.2".
std::string place_of(std::int64_t step, const CollectiveSignature& signature);

/// Returns the difference of ranks that issue different collectives at the same
/// place, `at`, for instance `dp.gather #12`. Empty when they agree.
std::optional<std::string> find_difference(
    const std::string& at,
    std::span<const IssuedCollective> issued);

/// "0-3, 7" for ascending ranks.
std::string rank_list(std::span<const int> ranks);

}  // namespace flatshard
