#pragma once

#include "flatshard/moe/token_exchange.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace flatshard::testing {

/// An exchange and a plan of it.
struct PlannedExchange {
  nn::TokenExchange& exchange;
  const nn::ExchangePlanPtr& plan;
};

/// Checks that tokens arrive, and that their sums equal `expected`'s bit for
/// bit. Each rank has counted as many rows for each expert there.
///
/// @param counts  int32 [experts] of both plans; rows after their sum are
///   dropped.
/// @param dtype   data type of the tokens, [rows, 5]
inline void expect_equal_exchanges(
    const PlannedExchange& expected,
    const PlannedExchange& got,
    const at::Tensor& counts,
    at::ScalarType dtype,
    at::Generator generator) {
  using Direction = nn::TokenExchange::Direction;
  constexpr std::int64_t kColumns = 5;
  const std::int64_t pairs = got.plan->num_sent;
  const std::int64_t slots = pairs % 2 == 0 ? 2 : 1;
  const at::Device device = counts.device();
  const at::Tensor on_host = counts.cpu();
  const std::int64_t num_experts = on_host.size(0);
  const auto num_counted = on_host.sum().item<std::int64_t>();
  const at::Tensor repeats = at::cat(
      {on_host.to(at::kLong), at::full({1}, pairs - num_counted, at::kLong)});
  const at::Tensor experts =
      at::arange(num_experts + 1, at::kInt)
          .repeat_interleave(repeats)
          .index_select(0, at::randperm(pairs, generator))
          .view({pairs / slots, slots})
          .to(device);
  const nn::Permutation tokens = nn::sort_by_expert(experts, counts);
  const auto numbers = [&](at::IntArrayRef sizes) {
    return at::randn(sizes, generator).to(device, dtype);
  };
  const auto exchanges_alike = [&](Direction direction,
                                   nn::TransferInput input,
                                   std::int64_t num_rows,
                                   std::int64_t num_results) {
    input.tokens = tokens;
    input.rows.push_back(
        at::randn({num_rows}, generator).to(device, at::kFloat));
    const nn::TensorList a =
        expected.exchange.start(expected.plan, direction, input)->finish();
    const nn::TensorList b =
        got.exchange.start(got.plan, direction, input)->finish();
    EXPECT_EQ(a[0].sizes(), b[0].sizes());
    EXPECT_TRUE(a[0].equal(b[0]));
    EXPECT_TRUE(
        a[1].narrow(0, 0, num_results).equal(b[1].narrow(0, 0, num_results)));
  };
  const std::int64_t received = got.plan->num_received;
  exchanges_alike(
      Direction::dispatch,
      {.rows = {numbers({pairs / slots, kColumns})}},
      pairs,
      received);
  const at::Tensor results = numbers({received, kColumns});
  exchanges_alike(
      Direction::combine,
      {.rows = {results}},
      received,
      num_counted);
  exchanges_alike(
      Direction::combine,
      {.rows = {results},
       .addend = numbers({1, pairs / slots, kColumns}).to(at::kFloat)},
      received,
      num_counted);
}

}  // namespace flatshard::testing
