#include "flatshard/group/initializer.h"

#include "flatshard/core/error.h"
#include "flatshard/core/philox.h"
#include "flatshard/device/parallel_for.h"
#include "flatshard/group/draw.h"
#include "flatshard/group/initializer_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <span>

namespace flatshard {
namespace {

/// Draws elements [first, first + out.size()) of the flattened parameter.
void draw_run(
    const Philox& philox,
    InitSpec spec,
    std::int64_t first,
    std::span<float> out) {
  const auto numel = static_cast<std::int64_t>(out.size());
  for (std::int64_t block = first / 4; block * 4 < first + numel; ++block) {
    const auto words = philox(static_cast<std::uint64_t>(block));
    std::array<float, 4> four{};
    draw::values_of(words.data(), spec, four.data());
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = block * 4 + i - first;
      if (at >= 0 && at < numel) {
        out[static_cast<std::size_t>(at)] = four[i];
      }
    }
  }
}

}  // namespace

void Initializer::fill(
    const at::Tensor& out,
    std::string_view name,
    InitSpec spec,
    std::int64_t begin) const {
  const std::int64_t end = begin + out.numel();
  fill(out, name, spec, FlatRuns(std::span(&end, 1), {{begin}, {out.numel()}}));
}

void Initializer::fill(
    const at::Tensor& out,
    std::string_view name,
    InitSpec spec,
    const FlatRuns& runs) const {
  FLATSHARD_CHECK(
      out.is_contiguous() && (spec.kind == InitSpec::Kind::zeros ||
                              at::isFloatingType(out.scalar_type())),
      internal,
      "expected a contiguous floating-point tensor for the values of {}",
      name);
  if (out.numel() == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (spec.kind == InitSpec::Kind::zeros) {
    out.zero_();
    return;
  }
  if (spec.kind == InitSpec::Kind::ones) {
    out.fill_(1);
    return;
  }
  const std::uint64_t key = mix_keys(seed_, stable_hash(name));
  if (out.is_cuda() && detail::draws_cuda(out.scalar_type())) {
    detail::draw_cuda(out, key, spec, runs);
    return;
  }
  // Bounded host memory, whatever the size of the shard.
  constexpr std::int64_t kChunk = std::int64_t{1} << 24;
  const Philox philox(key);
  for (std::int64_t at = 0; at < out.numel(); at += kChunk) {
    const std::int64_t count = std::min(kChunk, out.numel() - at);
    const at::Tensor host = at::empty({count}, at::kFloat);
    float* values = host.data_ptr<float>();
    parallel_for(
        at,
        at + count,
        1 << 16,
        [&](std::int64_t from, std::int64_t to) {
          for_each_run(
              runs,
              from,
              to,
              [&](std::int64_t first, std::int64_t local, std::int64_t n) {
                draw_run(
                    philox,
                    spec,
                    first,
                    {values + local - at, static_cast<std::size_t>(n)});
              });
        });
    out.view({-1}).narrow(0, at, count).copy_(host);
  }
}

}  // namespace flatshard
