#include "flatshard/train/setup/base_digest.h"

#include "flatshard/checkpoint/owned_boxes.h"
#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

namespace flatshard {
namespace {

// Elements at once: an int64 temporary of 128 MiB.
constexpr std::int64_t kDigestChunk = 1 << 24;
constexpr std::int64_t kOddFactor = 0x2545F4914F6CDD1D;

// Sum of bits * weight of their place, modulo 2^64: the order does not matter.
std::int64_t sum_of(const at::Tensor& values, std::int64_t begin) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = values.detach().reshape({-1});
  std::int64_t sum = 0;
  for (std::int64_t at = 0; at < flat.numel(); at += kDigestChunk) {
    const std::int64_t n = std::min(kDigestChunk, flat.numel() - at);
    const at::Tensor bits =
        flat.narrow(0, at, n).to(at::kBFloat16).view(at::kShort).to(at::kLong);
    at::Tensor weight = at::arange(begin + at, begin + at + n, bits.options());
    weight.mul_(2).add_(1).mul_(kOddFactor);
    weight.bitwise_xor_(weight.bitwise_right_shift(31));
    sum = static_cast<std::int64_t>(
        static_cast<std::uint64_t>(sum) +
        static_cast<std::uint64_t>(
            weight.mul_(bits).sum().item<std::int64_t>()));
  }
  return sum;
}

}  // namespace

std::uint64_t digest_of(const at::Tensor& values) {
  return static_cast<std::uint64_t>(sum_of(values, 0));
}

WeightDigests digest_weights(const std::vector<ParamGroup*>& groups) {
  WeightDigests digests;
  for (const OwnedBox& owned : boxes_to_write(groups, nullptr)) {
    std::uint64_t& digest = digests[owned.names.front()];
    if (owned.values.numel() == 0) {
      continue;
    }
    for_each_run(
        FlatRuns(owned.shape, owned.box),
        0,
        owned.values.numel(),
        [&](std::int64_t element, std::int64_t local, std::int64_t n) {
          digest += static_cast<std::uint64_t>(
              sum_of(owned.values.narrow(0, local, n), element));
        });
  }
  if (groups.empty() || groups.front()->model_mesh()->size() == 1) {
    return digests;
  }
  Communicator& world = groups.front()->model_mesh()->world();
  const auto count = static_cast<std::int64_t>(digests.size());
  const at::Tensor mine = at::empty({count}, at::kLong);
  auto* to = mine.mutable_data_ptr<std::int64_t>();
  for (const auto& [name, digest] : digests) {
    *to++ = static_cast<std::int64_t>(digest);
  }
  const CollectiveScope scope("digest of the base model");
  // Bytes, since not every backend sums integers.
  const at::Tensor in = mine.view(at::kByte).to(world.device());
  const at::Tensor out = at::empty({world.size() * in.numel()}, in.options());
  world.all_gather(out, in);
  const at::Tensor sum =
      out.cpu().view(at::kLong).view({world.size(), count}).sum(0);
  const auto* from = sum.const_data_ptr<std::int64_t>();
  for (auto& [name, digest] : digests) {
    digest = static_cast<std::uint64_t>(*from++);
  }
  return digests;
}

std::string to_json(const WeightDigests& digests) {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [name, digest] : digests) {
    json[name] = fmt::format("{:016x}", digest);
  }
  return json.dump();
}

WeightDigests parse_digests(
    const std::string& text,
    const std::string& origin) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  FLATSHARD_CHECK(
      json.is_object(),
      format,
      "{}: expected the digests of a base model, got {}",
      origin,
      text);
  WeightDigests digests;
  for (const auto& [name, value] : json.items()) {
    const std::string hex = value.is_string() ? value.get<std::string>() : "";
    std::uint64_t digest = 0;
    const auto [end, error] =
        std::from_chars(hex.data(), hex.data() + hex.size(), digest, 16);
    FLATSHARD_CHECK(
        !hex.empty() && error == std::errc() && end == hex.data() + hex.size(),
        format,
        "{}: expected the digest of {} in hexadecimal, got {}",
        origin,
        name,
        value.dump());
    digests[name] = digest;
  }
  return digests;
}

}  // namespace flatshard
