#pragma once

#include "flatshard/moe/token_exchange.h"

#include "tests/support/message_of.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace flatshard::testing {

/// begin_plan and finish_plan give what plan gives, and refuse an earlier plan.
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
  const auto earlier = exchange.begin_plan(counts, num_rows);
  const auto last = exchange.begin_plan(counts, num_rows);
  EXPECT_THAT(
      message_of([&] { exchange.finish_plan(earlier); }),
      ::testing::HasSubstr("expected each to be finished before the next"));
  exchange.finish_plan(last);
  EXPECT_TRUE(last->ends.equal(whole->ends));
  return last;
}

}  // namespace flatshard::testing
