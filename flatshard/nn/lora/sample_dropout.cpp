#include "flatshard/nn/lora/sample_dropout.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/device/parallel_for.h"
#include "flatshard/ops/cuda_ops.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <algorithm>
#include <utility>

namespace flatshard::nn {
namespace {

// A word of 32 bits below it drops its element.
std::uint64_t threshold_of(double p) {
  return static_cast<std::uint64_t>(p * 0x1p32);
}

// One block of Philox for four columns of a token.
template <class T>
void drop_row(
    const T* x,
    T* out,
    std::int64_t n,
    const cuda::SampleDropoutArgs& args,
    std::uint64_t sample,
    std::int64_t token,
    bool adds) {
  const Philox philox(args.key);
  const auto scale = static_cast<float>(args.scale);
  for (std::int64_t first = 0; first < n; first += 4) {
    const auto words = philox(
        static_cast<std::uint64_t>((args.first_column + first) / 4) |
            static_cast<std::uint64_t>(token) << 32,
        sample);
    const std::int64_t count = std::min<std::int64_t>(4, n - first);
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = words[i] < args.threshold
                              ? 0.0F
                              : scale * static_cast<float>(x[first + i]);
      out[first + i] = static_cast<T>(
          adds ? static_cast<float>(out[first + i]) + value : value);
    }
  }
}

}  // namespace

SampleDropout::SampleDropout(
    double p,
    std::uint64_t seed,
    at::Tensor samples,
    TokenPart part)
    : p_(p), seed_(seed), samples_(std::move(samples)), part_(part) {
  FLATSHARD_CHECK(
      p > 0.0 && p < 1.0,
      config,
      "dropout: expected a probability between 0 and 1, got {}",
      p);
}

at::Tensor SampleDropout::apply(
    const at::Tensor& x,
    std::uint64_t key,
    std::int64_t first_column) const {
  at::Tensor out = at::empty(x.sizes(), x.options());
  run(x, key, first_column, out, /*adds=*/false);
  return out;
}

void SampleDropout::add(
    const at::Tensor& x,
    std::uint64_t key,
    at::Tensor& sum,
    std::int64_t first_column) const {
  run(x, key, first_column, sum, /*adds=*/true);
}

void SampleDropout::run(
    const at::Tensor& x,
    std::uint64_t key,
    std::int64_t first_column,
    at::Tensor& out,
    bool adds) const {
  const std::int64_t batch = samples_.size(0);
  const std::int64_t num_tokens = x.size(0) * part_.num_parts();
  FLATSHARD_CHECK(
      x.dim() == 2 && num_tokens % batch == 0,
      usage,
      "dropout: expected the tokens of {} samples, got rows {}",
      batch,
      c10::str(x.sizes()));
  const at::Tensor in = x.contiguous();
  std::int64_t begin = 0;
  for (const TokenRange& range : part_.of(num_tokens)) {
    at::Tensor own = out.narrow(0, begin, range.size());
    run_rows(
        in.narrow(0, begin, range.size()),
        own,
        {.first_row = range.begin,
         .seq_len = num_tokens / batch,
         .key = mix_keys(seed_, key),
         .first_column = first_column,
         .threshold = threshold_of(p_),
         .scale = 1.0 / (1.0 - p_),
         .adds = adds});
    begin += range.size();
  }
}

void SampleDropout::run_rows(
    const at::Tensor& in,
    at::Tensor& out,
    const cuda::SampleDropoutArgs& args) const {
  if (cuda::supports(in)) {
    cuda::sample_dropout(in, samples_, out, args);
    return;
  }
  const std::int64_t n = in.size(1);
  const auto* samples = samples_.const_data_ptr<std::int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16,
      at::kHalf,
      in.scalar_type(),
      "sample_dropout",
      [&] {
        const auto* from = in.const_data_ptr<scalar_t>();
        auto* to = out.mutable_data_ptr<scalar_t>();
        parallel_for(
            0,
            in.size(0),
            64,
            [&](std::int64_t begin, std::int64_t end) {
              for (std::int64_t row = begin; row < end; ++row) {
                const std::int64_t token = args.first_row + row;
                const std::int64_t sample = samples[token / args.seq_len];
                cuda::SampleDropoutArgs own = args;
                if (sample < 0) {
                  own.threshold = 0;
                  own.scale = 1.0;
                }
                drop_row(
                    from + row * n,
                    to + row * n,
                    n,
                    own,
                    static_cast<std::uint64_t>(sample),
                    token % args.seq_len,
                    args.adds);
              }
            });
      });
}

}  // namespace flatshard::nn
