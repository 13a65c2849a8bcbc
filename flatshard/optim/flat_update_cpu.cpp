#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/parallel_for.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/flat_update_float8.h"
#include "flatshard/optim/state_codes.h"
#include "flatshard/optim/update_rules.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace flatshard {
namespace {

// Elements that are converted to float32, updated and converted back at once:
// they stay in the first cache, and one loop serves every mix of dtypes.
constexpr std::int64_t kBlock = 1024;
// Below this many elements a thread costs more than it gives.
constexpr std::int64_t kGrain = 1 << 17;

template <class T>
void load(const at::Tensor& from, std::int64_t at, std::int64_t n, float* to) {
  const T* source = from.data_ptr<T>() + at;
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<float>(source[i]);
  }
}

template <class T>
void store(
    const float* from,
    const at::Tensor& to,
    std::int64_t at,
    std::int64_t n) {
  T* target = to.data_ptr<T>() + at;
  for (std::int64_t i = 0; i < n; ++i) {
    target[i] = static_cast<T>(from[i]);
  }
}

void load_any(
    const at::Tensor& from,
    std::int64_t at,
    std::int64_t n,
    float* to) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      from.scalar_type(),
      "flat_update",
      [&] { load<scalar_t>(from, at, n, to); });
}

void store_any(
    const float* from,
    const at::Tensor& to,
    std::int64_t at,
    std::int64_t n) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      to.scalar_type(),
      "flat_update",
      [&] { store<scalar_t>(from, to, at, n); });
}

template <class Rule>
__attribute__((optimize("O3", "no-math-errno"))) void update_block(
    float* w,
    const float* grad,
    float* state0,
    float* state1,
    std::int64_t n,
    float scale,
    const UpdateRow& row) {
  const UpdateRow s = row;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    Rule::update(s, w[i], grad[i] * scale, state0[i], state1[i]);
  }
}

const StateRange& range_at(
    const std::vector<StateRange>& ranges,
    std::int64_t i) {
  return *std::upper_bound(
      ranges.begin(),
      ranges.end(),
      i,
      [](std::int64_t at, const StateRange& r) { return at < r.end; });
}

// float32 moments of n elements, decoded from their formats.
void load_state(
    const StateTensors& from,
    const StateRange& range,
    std::int64_t at,
    std::int64_t n,
    float* to) {
  const std::int64_t first = at + range.shift;
  if (range.format == StateFormat::float32) {
    load<float>(from.float32, first, n, to);
    return;
  }
  if (range.format == StateFormat::bfloat16) {
    load<at::BFloat16>(from.bfloat16, first, n, to);
    return;
  }
  const float* scales = from.scales.data_ptr<float>() + first / kStateBlock;
  for (std::int64_t b = 0; b < n; b += kStateBlock) {
    decode_state_block(
        from.codes.data_ptr(),
        from.codes.scalar_type() == at::kChar,
        first + b,
        scales[b / kStateBlock],
        to + b);
  }
}

void store_state(
    const float* from,
    const StateTensors& to,
    const StateRange& range,
    std::int64_t at,
    std::int64_t n) {
  const std::int64_t first = at + range.shift;
  if (range.format == StateFormat::float32) {
    store<float>(from, to.float32, first, n);
    return;
  }
  if (range.format == StateFormat::bfloat16) {
    store<at::BFloat16>(from, to.bfloat16, first, n);
    return;
  }
  float* scales = to.scales.data_ptr<float>() + first / kStateBlock;
  for (std::int64_t b = 0; b < n; b += kStateBlock) {
    scales[b / kStateBlock] = encode_state_block(
        from + b,
        to.codes.data_ptr(),
        to.codes.scalar_type() == at::kChar,
        first + b);
  }
}

// Rounds n new weights stochastically.
void store_rounded(
    const float* w,
    const FlatUpdate& u,
    std::int64_t at,
    std::int64_t n) {
  auto* to = reinterpret_cast<std::uint16_t*>(u.main.data_ptr<at::BFloat16>());
  auto range = std::upper_bound(
      u.rounding_ranges.begin(),
      u.rounding_ranges.end(),
      at,
      [](std::int64_t i, const RoundingRange& r) { return i < r.end; });
  std::uint64_t block = 0;
  std::array<std::uint32_t, 4> words{};
  bool drawn = false;
  for (std::int64_t i = at; i < at + n; ++i) {
    if (i >= range->end) {
      ++range;
      drawn = false;
    }
    const std::int64_t element = i + range->shift;
    const std::uint64_t wanted = stochastic_rounding::block_of(element);
    if (!drawn || wanted != block) {
      words = Philox(range->key)(wanted, u.rounding_step);
      block = wanted;
      drawn = true;
    }
    const int half = stochastic_rounding::half_of(element);
    to[i] = stochastic_rounding::round(
        w[i - at],
        words[half / 2] >> (half % 2 * 16) & 0xffffU);
  }
}

// Calls block(w, grad, at, n, row) over the shard, split at the ranges, with w
// and grad as float32 in cache. Skips ranges that are not updated.
template <class Block>
void for_blocks(const FlatUpdate& u, Block block) {
  const at::NoGradGuard no_grad;
  const std::vector<UpdateRange> ranges =
      u.ranges.empty() ? std::vector<UpdateRange>{{u.main.numel(), 0}}
                       : u.ranges;
  const std::int64_t numel = u.main.numel();
  // Threads get multiples of kBlock, so no block of an int8 state is split.
  parallel_for(
      0,
      ceil_div(numel, kBlock),
      kGrain / kBlock,
      [&](std::int64_t first, std::int64_t last) {
        std::int64_t begin = first * kBlock;
        const std::int64_t end = std::min(last * kBlock, numel);
        alignas(64) float w[kBlock];
        alignas(64) float g[kBlock];
        std::size_t range = 0;
        while (begin < end) {
          while (ranges[range].end <= begin) {
            ++range;
          }
          const auto [range_end, group] = ranges[range];
          if (group == UpdateRange::kSkipped) {
            begin = std::min(end, range_end);
            continue;
          }
          const std::int64_t n =
              std::min({kBlock, end - begin, range_end - begin});
          load_any(u.main, begin, n, w);
          load_any(u.grad, begin, n, g);
          block(w, g, begin, n, u.rows[group]);
          if (u.rounding_ranges.empty()) {
            store_any(w, u.main, begin, n);
          } else {
            store_rounded(w, u, begin, n);
          }
          if (u.compute.defined()) {
            store_any(w, u.compute, begin, n);
          }
          begin += n;
        }
      });
}

void check(const FlatUpdate& u, int num_states) {
  const std::int64_t n = u.main.numel();
  const auto fits = [&](const at::Tensor& t) {
    return t.defined() && t.numel() == n && t.is_contiguous() &&
           t.device() == u.main.device();
  };
  const auto fits_if = [&](const at::Tensor& t, bool is_required) {
    return (!is_required && !t.defined()) || fits(t);
  };
  FLATSHARD_CHECK(
      fits(u.main) && fits(u.grad) && fits_if(u.state0, num_states > 0) &&
          fits_if(u.state1, num_states > 1) && fits_if(u.compute, false),
      internal,
      "expected main, grad, compute and state of {} contiguous elements on one "
      "device",
      n);
  const bool rows_exist = std::all_of(
      u.ranges.begin(),
      u.ranges.end(),
      [&](const UpdateRange& range) {
        return range.group == UpdateRange::kSkipped ||
               (range.group >= 0 &&
                static_cast<std::size_t>(range.group) < u.rows.size());
      });
  FLATSHARD_CHECK(
      n == 0 || (u.ranges.empty() ? !u.rows.empty()
                                  : u.ranges.back().end >= n && rows_exist),
      internal,
      "expected ranges that cover all {} elements, each with one of {} rows",
      n,
      u.rows.size());
}

void check_ranges(const FlatUpdate& u) {
  const std::int64_t n = u.main.numel();
  const bool has_blocks = u.state_ranges.size() > 1 ||
                          (u.state_ranges.size() == 1 &&
                           u.state_ranges.front().format == StateFormat::int8);
  const auto complete = [&](const auto& ranges) {
    std::int64_t end = 0;
    for (const auto& range : ranges) {
      if (range.end < end || (has_blocks && range.end % kStateBlock != 0)) {
        return false;
      }
      end = range.end;
    }
    return ranges.empty() || end >= n;
  };
  FLATSHARD_CHECK(
      complete(u.state_ranges) && complete(u.rounding_ranges) &&
          (!has_blocks || (n % kStateBlock == 0 && complete(u.ranges))),
      internal,
      "expected ranges of states, rounding and rows that cover {} "
      "elements, and of int8 states in multiples of {}",
      n,
      kStateBlock);
  FLATSHARD_CHECK(
      u.rounding_ranges.empty() || u.main.scalar_type() == at::kBFloat16,
      internal,
      "stochastic rounding is for bfloat16 main weights, got {}",
      c10::toString(u.main.scalar_type()));
}

float host_scale(const FlatUpdate& u) {
  return u.grad_scale.defined() ? u.grad_scale.item<float>() : 1.0F;
}

template <class Rule>
void update_cpu(const FlatUpdate& u) {
  const float scale = host_scale(u);
  for_blocks(
      u,
      [&](float* w,
          const float* g,
          std::int64_t at,
          std::int64_t n,
          const UpdateRow& row) {
        alignas(64) float own[2][kBlock];
        if (u.state_ranges.empty()) {
          const auto values = [&](const at::Tensor& state, float* absent) {
            if (state.defined()) {
              return state.data_ptr<float>() + at;
            }
            std::fill_n(absent, n, 0.0F);
            return absent;
          };
          update_block<Rule>(
              w,
              g,
              values(u.state0, own[0]),
              values(u.state1, own[1]),
              n,
              scale,
              row);
          return;
        }
        for (std::int64_t done = 0; done < n;) {
          const StateRange& range = range_at(u.state_ranges, at + done);
          const std::int64_t here = std::min(n, range.end - at) - done;
          load_state(u.exp_avg, range, at + done, here, own[0]);
          load_state(u.exp_avg_sq, range, at + done, here, own[1]);
          update_block<Rule>(
              w + done,
              g + done,
              own[0],
              own[1],
              here,
              scale,
              row);
          store_state(own[0], u.exp_avg, range, at + done, here);
          store_state(own[1], u.exp_avg_sq, range, at + done, here);
          done += here;
        }
      });
}

at::Tensor bytes_of(const void* data, std::size_t nbytes) {
  return at::from_blob(
      const_cast<void*>(data),
      {static_cast<std::int64_t>(nbytes)},
      at::TensorOptions(at::kByte));
}

// Returns the update of one run.
FlatUpdate run_of(const FlatUpdate& u, const UpdateRun& run) {
  const std::int64_t n = run.end - run.begin;
  const auto part = [&](const at::Tensor& flat, std::int64_t begin) {
    return flat.defined() ? flat.narrow(0, begin, n) : flat;
  };
  FlatUpdate of_run;
  of_run.main = part(u.main, run.begin);
  of_run.compute = part(u.compute, run.begin);
  of_run.grad = part(u.grad, run.begin);
  of_run.state0 = part(u.state0, run.states_begin);
  of_run.state1 = part(u.state1, run.states_begin);
  of_run.grad_scale = u.grad_scale;
  of_run.rows = {u.rows.at(run.group)};
  return of_run;
}

}  // namespace

std::int64_t FlatUpdate::states_offset(std::int64_t local_offset) const {
  if (!runs) {
    return local_offset;
  }
  const auto run =
      std::find_if(runs->begin(), runs->end(), [&](const UpdateRun& r) {
        return local_offset >= r.begin && local_offset < r.end;
      });
  FLATSHARD_CHECK(
      run != runs->end(),
      internal,
      "element {} of a shard has no state",
      local_offset);
  return run->states_begin + local_offset - run->begin;
}

std::int64_t FlatUpdate::states_numel(std::int64_t shard_numel) const {
  if (!runs) {
    return shard_numel;
  }
  std::int64_t numel = 0;
  for (const UpdateRun& run : *runs) {
    numel += run.end - run.begin;
  }
  return numel;
}

void FlatUpdate::upload_ranges(at::Device device) {
  const auto upload = [&]<class Range>(const std::vector<Range>& of) {
    return of.empty() || !device.is_cuda()
               ? at::Tensor()
               : bytes_of(of.data(), of.size() * sizeof(Range)).to(device);
  };
  device_ranges = upload(ranges);
  device_state_ranges = upload(state_ranges);
  device_rounding_ranges = upload(rounding_ranges);
}

at::Tensor upload_rows(const std::vector<UpdateRow>& rows, at::Device device) {
  // The allocator of pinned memory keeps it until the copy has run.
  return bytes_of(rows.data(), rows.size() * sizeof(UpdateRow))
      .pin_memory()
      .to(device, /*non_blocking=*/true);
}

void flat_update(Algorithm algorithm, const FlatUpdate& u) {
  if (u.runs) {
    for (const UpdateRun& run : *u.runs) {
      if (run.group != UpdateRange::kSkipped) {
        flat_update(algorithm, run_of(u, run));
      }
    }
    return;
  }
  const bool has_rule = with_update_rule(algorithm, [&]<class Rule>(Rule) {
    check(u, u.state_ranges.empty() ? Rule::kRequiredStates : 0);
  });
  FLATSHARD_CHECK(has_rule, internal, "expected an algorithm with a rule");
  check_ranges(u);
  if (u.main.numel() == 0) {
    return;
  }
  if (u.planes.wanted()) {
    check_float8_outputs(u.planes, u.main);
  }
  if (u.main.is_cuda()) {
    flat_update_cuda(algorithm, u);
    return;
  }
  with_update_rule(algorithm, [&]<class Rule>(Rule) { update_cpu<Rule>(u); });
  if (u.planes.wanted()) {
    write_float8_outputs(u.planes, u.main);
  }
}

}  // namespace flatshard
