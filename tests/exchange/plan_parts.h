#pragma once

#include "flatshard/moe/token_exchange.h"

#include "tests/support/message_of.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace flatshard::testing {

/// begin_plan and finish_plan give the same plan as plan. Several plans may be
/// open at once, but a plan cannot be finished after a later one.
///
/// @return such a plan of `counts`, finished.
inline nn::ExchangePlanPtr expect_plans_in_parts(
    nn::TokenExchange& exchange,
    const at::Tensor& counts,
    std::int64_t num_rows) {
  const auto whole = exchange.plan(counts, num_rows);
  const auto parts = exchange.begin_plan(counts, num_rows);
  EXPECT_EQ(parts->num_sent, num_rows);
  EXPECT_EQ(parts->num_received, 0);
  for (int i = 0; i < 2; ++i) {  // the second one does nothing
    exchange.finish_plan(parts);
    EXPECT_TRUE(parts->ends.equal(whole->ends));
    EXPECT_EQ(parts->num_received, whole->num_received);
  }
  const auto none = exchange.begin_plan(at::zeros_like(counts), num_rows);
  const auto all = exchange.begin_plan(counts, num_rows);
  exchange.finish_plan(none);
  exchange.finish_plan(all);
  EXPECT_EQ(none->num_received, 0);
  EXPECT_TRUE(all->ends.equal(whole->ends));
  // One that is never finished does not block others.
  const auto earlier = exchange.begin_plan(counts, num_rows);
  const auto last = exchange.begin_plan(counts, num_rows);
  exchange.finish_plan(last);
  EXPECT_TRUE(last->ends.equal(whole->ends));
  EXPECT_THAT(
      message_of([&] { exchange.finish_plan(earlier); }),
      ::testing::HasSubstr("a plan is finished after a later one"));
  return last;
}

}  // namespace flatshard::testing
