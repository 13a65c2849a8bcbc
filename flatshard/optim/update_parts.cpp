#include "flatshard/optim/update_parts.h"

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/layout/local_range.h"
#include "flatshard/optim/moments.h"
#include "flatshard/optim/state_ranges.h"
#include "flatshard/optim/update_rules.h"

#include <algorithm>
#include <map>
#include <type_traits>
#include <utility>

namespace flatshard {
namespace {

/// A parameter's elements in the flat shard.
struct OwnPiece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::size_t parameter = 0;
};

// Returns the pieces that are not empty, in order.
std::vector<OwnPiece> own_pieces(const ShardPieces& pieces) {
  std::vector<OwnPiece> own;
  for (std::size_t i = 0; i < pieces.of_parameters.size(); ++i) {
    for (const Piece& piece : pieces.of_parameters[i]) {
      if (piece.numel > 0) {
        own.push_back(
            {.begin = piece.local_offset,
             .end = piece.local_offset + piece.numel,
             .parameter = i});
      }
    }
  }
  std::ranges::sort(own, {}, &OwnPiece::begin);
  return own;
}

/// Returns the format of AdamW's states for a parameter of a part.
StateFormat format_of(
    const TrainedGroup& group,
    const UpdatePart& part,
    const ParameterGroups& groups,
    std::size_t parameter) {
  const std::size_t row = part.rows[part.row_of[parameter]];
  return state_format_of(
      group.parameters[parameter],
      groups.groups[row].values.state_dtype);
}

// Checks that states in other formats than float32 are for the full shard.
void check_states(
    const TrainedGroup& group,
    const UpdatePart& part,
    const ParameterGroups& groups) {
  const auto skipped = std::ranges::count(part.row_of, UpdateRange::kSkipped);
  if (part.algorithm != Algorithm::adamw || skipped == 0) {
    return;
  }
  for (std::size_t i = 0; i < part.row_of.size(); ++i) {
    FLATSHARD_CHECK(
        part.row_of[i] == UpdateRange::kSkipped ||
            format_of(group, part, groups, i) == StateFormat::float32,
        config,
        "optimizer.state_dtype: AdamW updates {} of {} parameters of {}; "
        "expected all of them, because their states are stored together, or "
        "float32 states for {}. Set state_dtype in optimizer.param_groups, for "
        "units that only AdamW updates",
        std::ssize(part.row_of) - skipped,
        part.row_of.size(),
        group.name,
        group.parameters[i].names.front());
  }
}

// Returns how many float32 states an element has.
std::int64_t num_states(
    Algorithm algorithm,
    std::span<const ParameterValues> values) {
  std::int64_t num = 1;  // of Muon
  with_update_rule(algorithm, [&]<class Rule>(Rule) {
    if constexpr (std::is_same_v<Rule, AdamWRule>) {
      num = Rule::kRequiredStates;
    } else {
      num = Rule::has_states(values) ? std::ssize(Rule::kStates) : 0;
    }
  });
  return num;
}

}  // namespace

ShardPieces shard_pieces(const ParamGroup& group) {
  const FlatBuffer& main = group.weights().main();
  ShardPieces pieces{.numel = main.local().numel()};
  for (std::int64_t i = 0; i < group.layout().num_tensors(); ++i) {
    pieces.of_parameters.push_back(main.local_pieces(i));
  }
  return pieces;
}

ShardPieces shard_pieces(
    const GroupPlan& group,
    std::span<const std::int64_t> coordinate) {
  const FlatLayout& layout = *group.layout;
  const Placements& placements = group.shape.strategy.optimizer;
  const std::vector<std::int64_t>& sizes = group.shape.mesh.sizes;
  const ShardSpan span =
      shard_span(layout.num_shards(), placements, sizes, coordinate);
  ShardPieces pieces{.numel = local_numel(layout, placements, sizes)};
  for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
    pieces.of_parameters.push_back(layout.shard_pieces(i, span));
  }
  return pieces;
}

std::vector<UpdatePart> update_parts(
    const TrainedGroup& group,
    const std::vector<std::size_t>& of_parameters,
    const ParameterGroups& groups) {
  std::map<Algorithm, UpdatePart> by_algorithm;
  for (std::size_t i = 0; i < of_parameters.size(); ++i) {
    const std::size_t index = of_parameters[i];
    if (index == ParameterGroups::kNotUpdated) {
      continue;
    }
    const Algorithm algorithm = groups.groups.at(index).values.algorithm;
    UpdatePart& part = by_algorithm[algorithm];
    part.algorithm = algorithm;
    part.row_of.resize(of_parameters.size(), UpdateRange::kSkipped);
    const auto found = std::ranges::find(part.rows, index);
    part.row_of[i] = static_cast<std::int32_t>(found - part.rows.begin());
    if (found == part.rows.end()) {
      part.rows.push_back(index);
    }
  }
  std::vector<UpdatePart> parts;
  for (auto& [algorithm, part] : by_algorithm) {
    part.is_partial =
        std::ranges::count(part.row_of, UpdateRange::kSkipped) > 0;
    check_states(group, part, groups);
    parts.push_back(std::move(part));
  }
  return parts;
}

void check_stochastic_rounding(
    std::string_view name,
    Algorithm algorithm,
    bool is_partial) {
  FLATSHARD_CHECK(
      !is_partial && algorithm != Algorithm::muon,
      config,
      "{}: stochastic rounding requires one algorithm, adamw or sgd, for "
      "all parameters of a unit",
      name);
}

std::vector<UpdateRange> update_ranges(
    const ShardPieces& pieces,
    const std::vector<std::int32_t>& row_of) {
  std::vector<UpdateRange> ranges;
  for (const auto& [begin, end, parameter] : own_pieces(pieces)) {
    const std::int32_t row = row_of[parameter];
    if (!ranges.empty()) {
      ranges.back().end = begin;
    }
    if (!ranges.empty() && ranges.back().group == row) {
      ranges.back().end = end;
    } else {
      ranges.push_back({end, row});
    }
  }
  if (ranges.empty() || (ranges.size() == 1 && ranges[0].group == 0)) {
    return {};
  }
  ranges.back().end = pieces.numel;
  return ranges;
}

std::vector<UpdateRun> update_runs(
    const ShardPieces& pieces,
    const std::vector<std::int32_t>& of_part,
    const std::vector<std::int32_t>& row_of) {
  std::vector<UpdateRun> runs;
  std::int64_t states_numel = 0;
  for (const OwnPiece& piece : own_pieces(pieces)) {
    if (of_part[piece.parameter] == UpdateRange::kSkipped) {
      continue;
    }
    const std::int32_t row = row_of[piece.parameter];
    const std::int64_t end =
        std::min(round_up(piece.end, kLayoutAlignment), pieces.numel);
    if (!runs.empty() && runs.back().end == piece.begin &&
        runs.back().group == row) {
      runs.back().end = end;
    } else {
      runs.push_back(
          {.begin = piece.begin,
           .end = end,
           .group = row,
           .states_begin = states_numel});
    }
    states_numel += end - piece.begin;
  }
  return runs;
}

std::vector<ParameterValues> values_of(
    const std::vector<std::size_t>& rows,
    const ParameterGroups& groups) {
  std::vector<ParameterValues> values;
  for (const std::size_t row : rows) {
    values.push_back(groups.groups[row].values);
  }
  return values;
}

std::vector<StateFormat> state_formats(
    const UpdatePart& part,
    const ParameterGroups& groups,
    const TrainedGroup& group) {
  std::vector<StateFormat> formats;
  if (part.algorithm != Algorithm::adamw || part.is_partial) {
    return formats;
  }
  for (std::size_t i = 0; i < part.row_of.size(); ++i) {
    formats.push_back(format_of(group, part, groups, i));
  }
  if (std::ranges::count(formats, StateFormat::float32) ==
      std::ssize(formats)) {
    return {};
  }
  check_state_formats(group, formats);
  return formats;
}

PartSize size_of(
    const UpdatePart& part,
    const ParameterGroups& groups,
    const std::vector<StateFormat>& formats,
    const ShardPieces& pieces) {
  PartSize size{.numel = pieces.numel};
  if (!formats.empty()) {
    size.state_nbytes = states_nbytes(
        moment_ranges(formats, pieces.of_parameters, pieces.numel));
    return size;
  }
  if (part.is_partial) {
    size.numel = 0;
    for (const UpdateRun& run : update_runs(pieces, part.row_of, part.row_of)) {
      size.numel += run.end - run.begin;
    }
  }
  const std::int64_t num =
      num_states(part.algorithm, values_of(part.rows, groups));
  size.state_nbytes =
      size.numel * num * static_cast<std::int64_t>(sizeof(float));
  return size;
}

}  // namespace flatshard
