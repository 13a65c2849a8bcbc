#include "flatshard/optim/moments.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/core/rounding.h"
#include "flatshard/layout/local_range.h"
#include "flatshard/layout/rectangle.h"
#include "flatshard/optim/state_ranges.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace flatshard {
namespace {

// Returns the shards of each rank of a group. Replicas have the same ones.
std::vector<ShardSpan> spans_of_ranks(const GroupPlan& group) {
  const std::int64_t shards = group.layout->num_shards();
  const std::int64_t parts =
      num_parts(group.shape.strategy.optimizer, group.shape.mesh.sizes);
  std::vector<ShardSpan> spans;
  for (std::int64_t i = 0; i < parts; ++i) {
    const std::int64_t count = shards / parts;
    spans.push_back({.first = i * count, .count = count});
  }
  return spans;
}

bool is_of_blocks(const Piece& piece, std::int64_t numel) {
  const std::int64_t end = piece.tensor_offset + piece.numel;
  return piece.tensor_offset % kStateBlock == 0 &&
         piece.local_offset % kStateBlock == 0 &&
         (end % kStateBlock == 0 || end == numel);
}

void check_blocks(
    const GroupParameter& parameter,
    const std::vector<Piece>& pieces) {
  const std::int64_t numel = c10::multiply_integers(parameter.shape);
  for (const Piece& piece : pieces) {
    FLATSHARD_CHECK(
        piece.numel == 0 || is_of_blocks(piece, numel),
        config,
        "optimizer.state_dtype = int8: expected shards of full blocks of {} "
        "elements, got elements {} to {} of {} at element {} of its shard; use "
        "parallelism.granularity = element, alignment {} in C++, or "
        "granularity=\"dim0\" in Python",
        kStateBlock,
        piece.tensor_offset,
        piece.tensor_offset + piece.numel,
        parameter.names.front(),
        piece.local_offset,
        kInt8Alignment);
  }
}

// Returns the scales of int8 states. The blocks of a slice are blocks of the
// full tensor.
StateScales scales_of_slice(
    const std::string& name,
    const std::vector<std::int64_t>& shape,
    const TensorSlice& slice) {
  auto scales = state_scales(shape, slice);
  FLATSHARD_CHECK(
      scales.has_value(),
      config,
      "optimizer.state_dtype = int8: {} of shape [{}] is a slice of a tensor "
      "of shape [{}] and splits blocks of {} elements; use a smaller "
      "parallelism.tensor_parallel_degree, of experts "
      "expert_parallel_degree or expert_tensor_parallel_degree, or float32 or "
      "bfloat16 states for it",
      name,
      fmt::join(shape, ", "),
      fmt::join(slice.whole_shape(shape), ", "),
      kStateBlock);
  return *std::move(scales);
}

const at::Tensor& of_format(const StateTensors& state, StateFormat format) {
  switch (format) {
    case StateFormat::float32:
      return state.float32;
    case StateFormat::bfloat16:
      return state.bfloat16;
    case StateFormat::int8:
      break;
  }
  return state.codes;
}

}  // namespace

StateFormat state_format_of(
    const GroupParameter& parameter,
    StateFormat asked) {
  if (asked != StateFormat::int8) {
    return asked;
  }
  const auto attribute = parameter.attributes.find(kStateDtypeAttribute);
  return attribute != parameter.attributes.end() ||
                 c10::multiply_integers(parameter.whole_shape()) < kMinInt8Numel
             ? StateFormat::float32
             : StateFormat::int8;
}

std::vector<StateRange> moment_ranges(
    const std::vector<StateFormat>& formats,
    const std::vector<std::vector<Piece>>& pieces,
    std::int64_t numel) {
  // With one format all ranks have it, also a rank without elements.
  if (!formats.empty() && formats.front() != StateFormat::int8 &&
      std::ranges::count(formats, formats.front()) == std::ssize(formats)) {
    return {{.end = numel, .format = formats.front()}};
  }
  std::vector<StatePart> parts;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (const Piece& piece : pieces[i]) {
      if (piece.numel > 0) {
        parts.push_back({.begin = piece.local_offset, .format = formats[i]});
      }
    }
  }
  return state_ranges(std::move(parts), numel);
}

void check_state_formats(
    const TrainedGroup& group,
    const std::vector<StateFormat>& formats) {
  const std::span<const GroupParameter> parameters = group.parameters;
  const FlatLayout& layout = *group.plan->layout;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (formats[i] == StateFormat::int8) {
      scales_of_slice(
          parameters[i].names.front(),
          parameters[i].shape,
          parameters[i].slice());
    }
  }
  for (const ShardSpan span : spans_of_ranks(*group.plan)) {
    std::vector<std::vector<Piece>> pieces;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      pieces.push_back(layout.shard_pieces(static_cast<std::int64_t>(i), span));
      if (formats[i] == StateFormat::int8) {
        check_blocks(parameters[i], pieces.back());
      }
    }
    const std::vector<StateRange> ranges =
        moment_ranges(formats, pieces, layout.shard_numel() * span.count);
    FLATSHARD_CHECK(
        ranges.size() == 1 ||
            std::ranges::all_of(
                ranges,
                [](const StateRange& r) { return r.end % kStateBlock == 0; }),
        config,
        "{}: states of several formats need shards and parameters that start "
        "at multiples of {} elements; use one state_dtype for all parameters "
        "of the unit, alignment {} in C++, or ShardOptions(int8_states=True) "
        "in Python",
        group.name,
        kStateBlock,
        kInt8Alignment);
  }
}

void check_rounding(const TrainedGroup& group) {
  constexpr std::int64_t kDrawn = 4;  // elements of one draw
  const std::span<const GroupParameter> parameters = group.parameters;
  const FlatLayout& layout = *group.plan->layout;
  for (const ShardSpan span : spans_of_ranks(*group.plan)) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      for (const Piece& piece :
           layout.shard_pieces(static_cast<std::int64_t>(i), span)) {
        FLATSHARD_CHECK(
            piece.numel == 0 || (piece.tensor_offset % kDrawn == 0 &&
                                 piece.local_offset % kDrawn == 0),
            config,
            "optimizer.stochastic_rounding: expected shards that start at "
            "multiples of {} elements, got element {} of {}; use "
            "parallelism.granularity = element, or granularity=\"dim0\" in "
            "Python",
            kDrawn,
            piece.tensor_offset,
            parameters[i].names.front());
      }
    }
  }
}

Moments::Moments(
    const ParamGroup& group,
    const std::vector<StateFormat>& asked,
    at::Device device)
    : group_(&group) {
  const at::Tensor& main = group.weights().main().local();
  const std::vector<GroupParameter>& parameters = group.parameters();
  std::vector<StateFormat> formats;
  std::vector<std::vector<Piece>> pieces;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    formats.push_back(state_format_of(parameters[i], asked.at(i)));
    pieces.push_back(
        group.weights().main().local_pieces(static_cast<std::int64_t>(i)));
  }
  check_state_formats(trained_group(group), formats);
  ranges_ = moment_ranges(formats, pieces, main.numel());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (pieces[i].empty()) {
      parts_.push_back({.format = formats[i]});
    }
    for (const Piece& piece : pieces[i]) {
      const auto range = std::ranges::upper_bound(
          ranges_,
          piece.local_offset,
          {},
          &StateRange::end);
      parts_.push_back(
          {.format = formats[i],
           .at = piece.numel == 0 ? 0 : piece.local_offset + range->shift});
    }
  }
  const auto zeros = [&](StateFormat format, at::ScalarType dtype) {
    return at::zeros(
        {flatshard::numel_of(ranges_, format)},
        main.options().dtype(dtype).device(device));
  };
  const std::int64_t blocks =
      flatshard::numel_of(ranges_, StateFormat::int8) / kStateBlock;
  for (StateTensors* state : {&exp_avg_, &exp_avg_sq_}) {
    state->float32 = zeros(StateFormat::float32, at::kFloat);
    state->bfloat16 = zeros(StateFormat::bfloat16, at::kBFloat16);
    state->codes =
        zeros(StateFormat::int8, state == &exp_avg_ ? at::kChar : at::kByte);
    state->scales =
        at::zeros({blocks}, main.options().dtype(at::kFloat).device(device));
  }
  FlatUpdate update{.state_ranges = ranges_};
  update.upload_ranges(main.device());
  device_ranges_ = update.device_state_ranges;
}

void Moments::visit(const std::function<void(at::Tensor&)>& visit) {
  for (StateTensors* state : {&exp_avg_, &exp_avg_sq_}) {
    visit(state->float32);
    visit(state->bfloat16);
    visit(state->codes);
    visit(state->scales);
  }
}

void Moments::set_on(FlatUpdate& update) const {
  if (is_flat() && ranges_.front().format == StateFormat::float32) {
    update.state0 = exp_avg_.float32;
    update.state1 = exp_avg_sq_.float32;
    return;
  }
  update.state_ranges = ranges_;
  update.exp_avg = exp_avg_;
  update.exp_avg_sq = exp_avg_sq_;
  update.device_state_ranges = device_ranges_;
}

std::vector<std::pair<std::string, at::Tensor>> Moments::tensors() const {
  if (is_flat()) {
    const StateFormat format = ranges_.front().format;
    return {
        {"exp_avg", of_format(exp_avg_, format)},
        {"exp_avg_sq", of_format(exp_avg_sq_, format)}};
  }
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, state] :
       {std::pair{"exp_avg", &exp_avg_},
        std::pair{"exp_avg_sq", &exp_avg_sq_}}) {
    const std::string prefix = name;
    tensors.emplace_back(prefix + ".float32", state->float32);
    tensors.emplace_back(prefix + ".bfloat16", state->bfloat16);
    tensors.emplace_back(prefix + ".int8", state->codes);
    tensors.emplace_back(prefix + ".scale", state->scales);
  }
  return tensors;
}

std::vector<NamedShard> Moments::values_of(const StateTensors& state) const {
  std::vector<NamedShard> shards = group_->main_shards();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto [format, at] = parts_.at(i);
    shards[i].tensor =
        of_format(state, format).narrow(0, at, shards[i].tensor.numel());
  }
  return shards;
}

std::vector<NamedShard> Moments::scales_of(const StateTensors& state) const {
  std::vector<NamedShard> shards;
  const std::vector<NamedShard> main = group_->main_shards();
  for (std::size_t i = 0; i < main.size(); ++i) {
    const auto [format, at] = parts_.at(i);
    if (format != StateFormat::int8) {
      continue;
    }
    NamedShard shard = main[i];
    StateScales scales =
        scales_of_slice(shard.name(), shard.shape, shard.slice);
    shard.shape = std::move(scales.shape);
    shard.slice = std::move(scales.slice);
    shard.begin /= kStateBlock;
    shard.tensor = state.scales.narrow(
        0,
        at / kStateBlock,
        ceil_div(shard.tensor.numel(), kStateBlock));
    shards.push_back(std::move(shard));
  }
  return shards;
}

std::vector<std::pair<std::string, std::vector<NamedShard>>> Moments::shards()
    const {
  std::vector<std::pair<std::string, std::vector<NamedShard>>> shards;
  for (const auto& [name, state] :
       {std::pair{"exp_avg", &exp_avg_},
        std::pair{"exp_avg_sq", &exp_avg_sq_}}) {
    shards.emplace_back(name, values_of(*state));
    if (auto scales = scales_of(*state); !scales.empty()) {
      shards.emplace_back(
          std::string(name) + std::string(kScaleSuffix),
          std::move(scales));
    }
  }
  return shards;
}

std::vector<RoundingRange> rounding_ranges(
    const ParamGroup& group,
    std::uint64_t seed) {
  check_rounding(trained_group(group));
  std::vector<NamedShard> shards = group.main_shards();
  std::erase_if(shards, [](const NamedShard& shard) {
    return shard.tensor.numel() == 0;
  });
  std::ranges::sort(shards, {}, &NamedShard::local_offset);
  const std::int64_t numel = group.weights().main().local().numel();
  std::vector<RoundingRange> ranges;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const NamedShard& shard = shards[i];
    const std::int64_t end =
        i + 1 < shards.size() ? shards[i + 1].local_offset : numel;
    std::int64_t shift = shard.begin - shard.local_offset;
    std::uint64_t key = mix_keys(seed, stable_hash(shard.name()));
    const auto boxes =
        shard.slice.boxes(shard.shape, 0, c10::multiply_integers(shard.shape));
    if (!boxes.empty()) {
      const FlatRuns runs(shard.whole_shape(), boxes.front());
      if (boxes.size() == 1 && runs.size() == 1) {
        shift += runs.begin(0);  // counted in the full tensor
      } else {
        key = mix_keys(key, static_cast<std::uint64_t>(runs.begin(0)));
      }
    }
    ranges.push_back({.end = end, .shift = shift, .key = key});
  }
  if (ranges.empty()) {
    ranges.push_back({.end = numel});
  }
  return ranges;
}

}  // namespace flatshard
