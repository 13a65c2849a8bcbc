#include "flatshard/optim/moments.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/core/rounding.h"
#include "flatshard/layout/rectangle.h"
#include "flatshard/optim/state_ranges.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

namespace flatshard {
namespace {

void check_blocks(const NamedShard& shard) {
  const std::int64_t end = shard.begin + shard.tensor.numel();
  FLATSHARD_CHECK(
      shard.begin % kStateBlock == 0 && shard.local_offset % kStateBlock == 0 &&
          (end % kStateBlock == 0 ||
           end == c10::multiply_integers(shard.shape)),
      config,
      "optimizer.state_dtype = int8: expected shards of full blocks of {} "
      "elements, got elements {} to {} of {} at element {} of its shard; use "
      "parallelism.granularity = element, and alignment {} in C++",
      kStateBlock,
      shard.begin,
      end,
      shard.name(),
      shard.local_offset,
      kInt8Alignment);
}

// The blocks of a slice are blocks of the full tensor.
void check_slice(const NamedShard& shard) {
  if (shard.slice.is_whole(shard.shape)) {
    return;
  }
  const std::vector<std::int64_t> scales = state_scales_shape(shard.shape);
  bool fits = scales.size() == shard.shape.size();
  if (fits) {
    try {
      shard.slice.check(scales, shard.name());
      fits = shard.slice.whole_shape(scales) ==
             state_scales_shape(shard.whole_shape());
    } catch (const Error&) {
      fits = false;
    }
  }
  FLATSHARD_CHECK(
      fits,
      config,
      "optimizer.state_dtype = int8: {} of shape [{}] is a slice of a tensor "
      "of shape [{}] and splits blocks of {} elements; use a smaller "
      "parallelism.tensor_parallel_degree, of experts "
      "expert_parallel_degree or expert_tensor_parallel_degree, or float32 or "
      "bfloat16 states",
      shard.name(),
      fmt::join(shard.shape, ", "),
      fmt::join(shard.whole_shape(), ", "),
      kStateBlock);
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

std::vector<std::int64_t> state_scales_shape(
    const std::vector<std::int64_t>& shape) {
  if (shape.empty() || shape.back() % kStateBlock != 0) {
    return {ceil_div(c10::multiply_integers(shape), kStateBlock)};
  }
  std::vector<std::int64_t> scales = shape;
  scales.back() /= kStateBlock;
  return scales;
}

Moments::Moments(const ParamGroup& group, StateFormat asked) {
  const at::Tensor& main = group.weights().main().local();
  const std::int64_t numel = main.numel();
  std::vector<NamedShard> shards = group.main_shards();
  std::map<std::string, StateFormat> formats;
  for (const GroupParameter& p : group.parameters()) {
    formats[p.names.front()] = state_format_of(p, asked);
  }
  std::vector<StatePart> parts;
  for (const NamedShard& shard : shards) {
    const StateFormat format = formats.at(shard.name());
    if (shard.tensor.numel() == 0) {
      continue;
    }
    if (format == StateFormat::int8) {
      check_blocks(shard);
      check_slice(shard);
    }
    parts.push_back({.begin = shard.local_offset, .format = format});
  }
  // All ranks have the same format, also a rank without elements.
  ranges_ = asked == StateFormat::int8
                ? state_ranges(std::move(parts), numel)
                : std::vector<StateRange>{{.end = numel, .format = asked}};
  FLATSHARD_CHECK(
      ranges_.size() == 1 ||
          std::ranges::all_of(
              ranges_,
              [](const StateRange& r) { return r.end % kStateBlock == 0; }),
      config,
      "optimizer.state_dtype: states of several formats need shards and "
      "parameters that start at multiples of {} elements; set alignment {}",
      kStateBlock,
      kInt8Alignment);
  for (NamedShard& shard : shards) {
    const StateFormat format = formats.at(shard.name());
    std::int64_t at = 0;
    if (shard.tensor.numel() > 0) {
      at = shard.local_offset + std::ranges::upper_bound(
                                    ranges_,
                                    shard.local_offset,
                                    {},
                                    &StateRange::end)
                                    ->shift;
    }
    parts_.push_back({.shard = std::move(shard), .format = format, .at = at});
  }
  const auto zeros = [&](StateFormat format, at::ScalarType dtype) {
    return at::zeros(
        {flatshard::numel_of(ranges_, format)},
        main.options().dtype(dtype));
  };
  const std::int64_t blocks =
      flatshard::numel_of(ranges_, StateFormat::int8) / kStateBlock;
  for (StateTensors* state : {&exp_avg_, &exp_avg_sq_}) {
    state->float32 = zeros(StateFormat::float32, at::kFloat);
    state->bfloat16 = zeros(StateFormat::bfloat16, at::kBFloat16);
    state->codes =
        zeros(StateFormat::int8, state == &exp_avg_ ? at::kChar : at::kByte);
    state->scales = at::zeros({blocks}, main.options().dtype(at::kFloat));
  }
  FlatUpdate update{.state_ranges = ranges_};
  update.upload_ranges(main.device());
  device_ranges_ = update.device_state_ranges;
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
  std::vector<NamedShard> shards;
  for (const Part& part : parts_) {
    shards.push_back(part.shard);
    shards.back().tensor = of_format(state, part.format)
                               .narrow(0, part.at, part.shard.tensor.numel());
  }
  return shards;
}

std::vector<NamedShard> Moments::scales_of(const StateTensors& state) const {
  std::vector<NamedShard> shards;
  for (const Part& part : parts_) {
    if (part.format != StateFormat::int8) {
      continue;
    }
    NamedShard shard = part.shard;
    shard.shape = state_scales_shape(part.shard.shape);
    if (shard.shape.size() != part.shard.shape.size()) {
      shard.slice = {};  // of a whole tensor: check_slice
    }
    shard.begin /= kStateBlock;
    shard.tensor = state.scales.narrow(
        0,
        part.at / kStateBlock,
        ceil_div(part.shard.tensor.numel(), kStateBlock));
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
    FLATSHARD_CHECK(
        shift % 4 == 0 && end % 4 == 0,
        config,
        "optimizer.stochastic_rounding: expected shards that start at "
        "multiples of 4 elements, got element {} of {}; use "
        "parallelism.granularity = element",
        shard.begin,
        shard.name());
    ranges.push_back({.end = end, .shift = shift, .key = key});
  }
  if (ranges.empty()) {
    ranges.push_back({.end = numel});
  }
  return ranges;
}

}  // namespace flatshard
