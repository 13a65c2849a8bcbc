#include "flatshard/plan/streams.h"

#include "flatshard/core/error.h"

#include <gtest/gtest.h>

namespace flatshard::plan {
namespace {

Operation compute(double seconds, std::vector<int> waits = {}) {
  return {.seconds = seconds, .waits = std::move(waits)};
}
Operation gather(double seconds, std::vector<int> waits = {}) {
  return {
      .stream = Stream::gather,
      .link = Link::copies,
      .seconds = seconds,
      .waits = std::move(waits)};
}

TEST(Streams, RunInParallelUntilOneWaits) {
  const auto spans =
      run_streams({gather(2), compute(1), compute(3, {0}), gather(4, {1})}, {});
  EXPECT_EQ(spans[0], (Span{0, 2}));
  EXPECT_EQ(spans[1], (Span{0, 1}));
  EXPECT_EQ(spans[2], (Span{2, 5}));
  EXPECT_EQ(spans[3], (Span{2, 6}));
}

TEST(Streams, ComputeIsSlowerBesideTransfers) {
  // 2 of 3 s of compute run in parallel with copies, at half the rate: 1 s of
  // them is done by then.
  const auto spans = run_streams({gather(2), compute(3)}, {.copies = 2});
  EXPECT_EQ(spans[0], (Span{0, 2}));
  EXPECT_EQ(spans[1], (Span{0, 4}));
}

TEST(Streams, TransfersAreSlowerBesideCompute) {
  // 1 of 3 s of copies is done after 2 s in parallel with compute.
  Operation slow = gather(3);
  slow.beside_compute = 6;
  const auto spans = run_streams({slow, compute(2)}, {});
  EXPECT_EQ(spans[1], (Span{0, 2}));
  EXPECT_EQ(spans[0], (Span{0, 4}));
}

TEST(Streams, KernelsShareTheGpu) {
  Operation sum = compute(1);
  sum.stream = Stream::reduce;
  // Both take 2 s for their first second, and 2 s of compute are left.
  const auto spans = run_streams({compute(3), sum}, {});
  EXPECT_EQ(spans[1], (Span{0, 2}));
  EXPECT_EQ(spans[0], (Span{0, 4}));
}

TEST(Streams, TransfersOverOneLinkShareIt) {
  Operation reduce = gather(1);
  reduce.stream = Stream::reduce;
  const auto spans = run_streams({gather(3), reduce}, {});
  EXPECT_EQ(spans[1], (Span{0, 2}));
  EXPECT_EQ(spans[0], (Span{0, 4}));
  Operation nccl = reduce;
  nccl.link = Link::collectives;
  EXPECT_EQ(run_streams({gather(3), nccl}, {})[0], (Span{0, 3}));
}

// Activations go over NVLink while weights come over the network.
TEST(Streams, TensorParallelismInsideAHostDoesNotShareTheNetwork) {
  Operation inside = gather(1);
  inside.stream = Stream::tensor;
  Operation outside = gather(3);
  outside.leaves_host = true;
  const auto apart = run_streams({outside, inside}, {});
  EXPECT_EQ(apart[0], (Span{0, 3}));
  EXPECT_EQ(apart[1], (Span{0, 1}));
  inside.leaves_host = true;
  const auto shared = run_streams({outside, inside}, {});
  EXPECT_EQ(shared[1], (Span{0, 2}));
  EXPECT_EQ(shared[0], (Span{0, 4}));
}

TEST(Streams, WhatTakesNoTimeIsOverAtOnce) {
  const auto spans =
      run_streams({compute(0), gather(0, {0}), compute(1, {1})}, {});
  EXPECT_EQ(spans[2], (Span{0, 1}));
}

TEST(Streams, FindsOperationsThatWaitForEachOther) {
  EXPECT_THROW(run_streams({compute(1, {1}), gather(1, {0})}, {}), Error);
}

}  // namespace
}  // namespace flatshard::plan
