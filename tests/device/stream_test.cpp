#include "flatshard/device/stream.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

#include "flatshard/core/error.h"
#include "tests/support/message_of.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

const at::Device kCpu(at::kCPU);

TEST(CpuStream, RunsWorkInOrderOnItsOwnThread) {
  const auto stream = make_stream(kCpu, "order", {.max_delay_us = 50});
  std::vector<int> seen;
  std::thread::id worker;
  for (int i = 0; i < 50; ++i) {
    stream->submit([&, i] {
      seen.push_back(i);
      worker = std::this_thread::get_id();
    });
  }
  stream->synchronize();
  ASSERT_EQ(seen.size(), 50u);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(seen[i], i);
  }
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST(CpuStream, SubmitDoesNotWaitForTheWork) {
  const auto stream = make_stream(kCpu, "submit");
  std::promise<void> gate;
  std::atomic<bool> done = false;
  stream->submit([&] {
    gate.get_future().wait();
    done = true;
  });
  Event event;
  event.record(*stream);
  EXPECT_TRUE(event.recorded());
  EXPECT_FALSE(event.query());  // a submit that waited would hang before
  EXPECT_FALSE(done);
  gate.set_value();
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(done);
}

TEST(CpuStream, WorkRunsWithoutGradients) {
  const auto stream = make_stream(kCpu, "grad");
  bool worker_mode = true;
  bool caller_mode = true;
  stream->submit([&] { worker_mode = at::GradMode::is_enabled(); });
  stream->synchronize();
  current_stream(kCpu)->submit(
      [&] { caller_mode = at::GradMode::is_enabled(); });
  EXPECT_FALSE(worker_mode);
  EXPECT_FALSE(caller_mode);
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST(CpuStream, ReleasesItsWorkBeforeTheEvent) {
  const auto stream = make_stream(kCpu, "captures");
  auto value = std::make_shared<int>(1);
  const std::weak_ptr<int> weak = value;
  stream->submit([value] {});
  value.reset();
  stream->synchronize();
  EXPECT_TRUE(weak.expired());
}

// A chain producer -> consumer -> producer ... over two streams, with random
// delays. Returns how many steps saw what they should.
int run_chain(bool with_waits, std::uint64_t seed) {
  const auto a =
      make_stream(kCpu, "a", {.delay_seed = seed, .max_delay_us = 300});
  const auto b =
      make_stream(kCpu, "b", {.delay_seed = seed, .max_delay_us = 300});
  constexpr int kSteps = 40;
  std::atomic<int> slot = -1;
  std::atomic<int> correct = 0;
  Event filled;
  Event consumed;
  for (int i = 0; i < kSteps; ++i) {
    if (with_waits) {
      consumed.wait(*a);
    }
    a->submit([&, i] { slot = i; });
    filled.record(*a);
    if (with_waits) {
      filled.wait(*b);
    }
    b->submit([&, i] { correct += slot == i; });
    consumed.record(*b);
  }
  a->synchronize();
  b->synchronize();
  return correct;
}

TEST(CpuStream, EventsOrderTwoStreams) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    EXPECT_EQ(run_chain(true, seed), 40) << "seed " << seed;
  }
}

TEST(CpuStream, DelaysShowAMissingWait) {
  int correct = 0;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    correct += run_chain(false, seed);
  }
  EXPECT_LT(correct, 5 * 40);
}

TEST(CpuStream, RecordingAgainLeavesEarlierWaitsAlone) {
  const auto a = make_stream(kCpu, "a");
  const auto b = make_stream(kCpu, "b");
  std::promise<void> gate;
  auto opened = gate.get_future().share();
  Event event;
  event.record(*a);  // complete once a is idle
  event.wait(*b);
  a->submit([opened] { opened.wait(); });
  event.record(*a);  // not complete until the gate opens
  b->synchronize();  // hangs if the wait followed the second record
  EXPECT_FALSE(event.query());
  gate.set_value();
  event.synchronize();
}

TEST(Event, NeverRecordedIsComplete) {
  const auto stream = make_stream(kCpu, "s");
  const Event event;
  EXPECT_FALSE(event.recorded());
  EXPECT_TRUE(event.query());
  event.wait(*stream);
  event.synchronize();
  stream->synchronize();
}

TEST(CallerStream, RunsAtOnceAndWaitsOnTheHost) {
  const auto compute = current_stream(kCpu);
  int value = 0;
  compute->submit([&] { value = 1; });
  EXPECT_EQ(value, 1);
  Event event;
  event.record(*compute);
  EXPECT_TRUE(event.recorded());
  EXPECT_TRUE(event.query());

  const auto stream = make_stream(kCpu, "s", {.max_delay_us = 2000});
  std::atomic<bool> done = false;
  stream->submit([&] { done = true; });
  event.record(*stream);
  event.wait(*compute);
  EXPECT_TRUE(done);
}

TEST(CallerStream, ErrorsLeaveSubmit) {
  EXPECT_THAT(
      message_of([] {
        current_stream(kCpu)->submit([] { throw std::runtime_error("now"); });
      }),
      HasSubstr("now"));
}

TEST(CpuStream, FirstErrorIsKeptAndLaterWorkIsSkipped) {
  const auto stream = make_stream(kCpu, "fails");
  bool skipped = true;
  stream->submit([] { throw std::runtime_error("first"); });
  stream->submit([&] { skipped = false; });
  stream->submit([] { throw std::runtime_error("second"); });
  EXPECT_EQ(message_of([&] { stream->synchronize(); }), "first");
  EXPECT_EQ(message_of([&] { stream->synchronize(); }), "first");
  EXPECT_TRUE(skipped);
}

TEST(CpuStream, EventsAfterAnErrorCarryItToEveryWaiter) {
  const auto a = make_stream(kCpu, "a");
  const auto b = make_stream(kCpu, "b");
  Event before;
  before.record(*a);
  a->submit([] { throw std::runtime_error("from a"); });
  Event after;
  after.record(*a);
  before.synchronize();  // came before the failure
  EXPECT_EQ(message_of([&] { after.synchronize(); }), "from a");
  EXPECT_TRUE(after.query());
  bool skipped = true;
  after.wait(*b);
  b->submit([&] { skipped = false; });
  EXPECT_EQ(message_of([&] { b->synchronize(); }), "from a");
  EXPECT_TRUE(skipped);
  EXPECT_EQ(message_of([&] { after.wait(*current_stream(kCpu)); }), "from a");
}

TEST(CpuStream, ResetMakesAFailedStreamUsable) {
  const auto stream = make_stream(kCpu, "reset");
  stream->submit([] { throw std::runtime_error("gone"); });
  stream->reset();
  int value = 0;
  stream->submit([&] { value = 1; });
  stream->synchronize();
  EXPECT_EQ(value, 1);
}

TEST(CpuStream, DestructorFinishesTheWorkAndDoesNotThrow) {
  std::atomic<int> count = 0;
  {
    const auto stream = make_stream(kCpu, "end", {.max_delay_us = 100});
    for (int i = 0; i < 20; ++i) {
      stream->submit([&] { ++count; });
    }
  }
  EXPECT_EQ(count, 20);
  ::testing::internal::CaptureStderr();
  {
    const auto stream = make_stream(kCpu, "unseen");
    stream->submit([] { throw std::runtime_error("nobody looked"); });
  }
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("nobody looked"));
}

TEST(CpuStream, MayBeDestroyedByItsOwnWork) {
  std::promise<void> ready;
  std::promise<void> ran;
  auto stream = make_stream(kCpu, "self");
  auto holder = std::make_shared<std::shared_ptr<Stream>>(stream);
  stream->submit([holder, &ready, &ran] {
    ready.get_future().wait();
    holder->reset();  // the last owner
    ran.set_value();
  });
  stream.reset();
  holder.reset();
  ready.set_value();
  ran.get_future().wait();
}

TEST(MakeStream, RefusesByName) {
  EXPECT_THAT(
      message_of([] { make_stream(at::Device(at::kMeta), "s"); }),
      HasSubstr("expected a device of type cpu or cuda, got 'meta'"));
  EXPECT_THAT(
      message_of([] { make_stream(kCpu, "s", {.max_delay_us = -1}); }),
      HasSubstr("stream 's': expected max_delay_us >= 0, got -1"));
  if (!cuda_available()) {
    EXPECT_THAT(
        message_of([] { make_stream(at::Device(at::kCUDA, 0), "s"); }),
        HasSubstr("use device cpu"));
    EXPECT_EQ(num_cuda_devices(), 0);
  }
}

TEST(CudaStream, EventsOrderTwoStreams) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const at::Device gpu(at::kCUDA, 0);
  const auto a = make_stream(gpu, "a", {.max_delay_us = 500});
  const auto b =
      make_stream(gpu, "b", {.high_priority = true, .max_delay_us = 500});
  const at::Tensor slot = at::zeros({1 << 16}, at::device(gpu));
  const at::Tensor wrong = at::zeros({}, at::device(gpu).dtype(at::kLong));
  Event start;
  start.record(*current_stream(gpu));
  start.wait(*a);
  start.wait(*b);
  Event filled;
  Event consumed;
  for (int i = 0; i < 40; ++i) {
    consumed.wait(*a);
    a->submit([&] { at::Tensor(slot).fill_(i); });
    filled.record(*a);
    filled.wait(*b);
    b->submit([&] { at::Tensor(wrong).add_(slot.ne(i).sum()); });
    consumed.record(*b);
  }
  b->synchronize();
  EXPECT_EQ(wrong.item<std::int64_t>(), 0);
}

// Their handles serve other events by then.
TEST(CudaStream, EventsThatAreGoneAreStillWaitedFor) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const at::Device gpu(at::kCUDA, 0);
  const auto a = make_stream(gpu, "a", {.max_delay_us = 500});
  const auto b = make_stream(gpu, "b", {.max_delay_us = 500});
  const auto idle = make_stream(gpu, "idle");
  const auto wait_for = [&](Stream& earlier, Stream& later) {
    {
      Event event;
      event.record(earlier);
      event.wait(later);
    }
    Event reused;
    reused.record(*idle);
  };
  const at::Tensor slot = at::zeros({1 << 16}, at::device(gpu));
  const at::Tensor wrong = at::zeros({}, at::device(gpu).dtype(at::kLong));
  wait_for(*current_stream(gpu), *a);
  wait_for(*current_stream(gpu), *b);
  for (int i = 0; i < 40; ++i) {
    a->submit([&] { at::Tensor(slot).fill_(i); });
    wait_for(*a, *b);
    b->submit([&] { at::Tensor(wrong).add_(slot.ne(i).sum()); });
    wait_for(*b, *a);
  }
  b->synchronize();
  EXPECT_EQ(wrong.item<std::int64_t>(), 0);
}

}  // namespace
}  // namespace flatshard
