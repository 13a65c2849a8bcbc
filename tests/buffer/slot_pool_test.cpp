#include "flatshard/buffer/slot_pool.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>

namespace flatshard {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<Stream> slow_stream(int seed) {
  return make_stream(
      at::kCPU,
      "slow",
      {.delay_seed = static_cast<std::uint64_t>(seed), .max_delay_us = 20000});
}

struct SlotPoolTest : ::testing::Test {
  SlotPoolTest() { pool.set_arena(1024); }

  Slot acquire(std::int64_t offset, std::int64_t nbytes) {
    return pool.acquire(offset, nbytes, filler);
  }
  void release(Slot& slot) { pool.release(slot, Event(), filler); }

  SlotPool pool{at::kCPU};
  std::shared_ptr<Stream> filler = make_stream(at::kCPU, "filler");
};

TEST_F(SlotPoolTest, TheSameUseHasTheSameAddress) {
  void* first = nullptr;
  void* second = nullptr;
  for (int step = 0; step < 3; ++step) {
    Slot a = acquire(0, 256);
    Slot b = acquire(256, 512);
    EXPECT_TRUE(a.held());
    EXPECT_EQ(a.offset, 0);
    EXPECT_EQ(b.nbytes, 512);
    EXPECT_EQ(static_cast<char*>(b.data) - static_cast<char*>(a.data), 256);
    if (step > 0) {
      EXPECT_EQ(a.data, first);
      EXPECT_EQ(b.data, second);
    }
    first = a.data;
    second = b.data;
    release(b);
    release(a);
    EXPECT_FALSE(a.held());
  }
  EXPECT_EQ(pool.num_dynamic(), 0);
}

TEST_F(SlotPoolTest, CountsWhatIsHeld) {
  Slot a = acquire(0, 256);
  Slot b = acquire(-1, 100);
  EXPECT_EQ(pool.num_held(), 2);
  EXPECT_EQ(pool.peak_held_nbytes(), 356);
  release(a);
  Slot c = acquire(0, 50);
  EXPECT_EQ(pool.peak_held_nbytes(), 356);
  EXPECT_EQ(pool.dynamic_nbytes(), 100);
  release(b);
  release(c);
  EXPECT_EQ(pool.num_held(), 0);
  EXPECT_EQ(pool.dynamic_nbytes(), 0);
  EXPECT_EQ(pool.arena_nbytes(), 1024);
}

TEST_F(SlotPoolTest, R31_WhatDoesNotFitGetsABufferOfItsOwn) {
  Slot held = acquire(128, 256);
  struct Use {
    std::int64_t offset;
    std::int64_t nbytes;
    bool in_arena;
  };
  const std::vector<Use> uses{
      {-1, 64, false},    // not planned
      {0, 129, false},    // its end is taken
      {383, 10, false},   // its begin is taken
      {200, 10, false},   // inside
      {0, 1024, false},   // around
      {1000, 25, false},  // beyond the end
      {0, 128, true},
      {384, 640, true}};
  std::int64_t num_dynamic = 0;
  for (const Use& use : uses) {
    Slot slot = acquire(use.offset, use.nbytes);
    EXPECT_EQ(slot.dynamic.defined(), !use.in_arena) << use.offset;
    EXPECT_EQ(slot.offset, use.in_arena ? use.offset : -1);
    ASSERT_TRUE(slot.held());
    std::memset(slot.data, 1, use.nbytes);  // for the sanitizer
    num_dynamic += use.in_arena ? 0 : 1;
    EXPECT_EQ(pool.num_dynamic(), num_dynamic);
    release(slot);
  }
  release(held);
}

TEST_F(SlotPoolTest, TheFillerWaitsForFormerTenants) {
  for (int round = 0; round < 5; ++round) {
    const auto slow_a = slow_stream(2 * round);
    const auto slow_b = slow_stream(2 * round + 1);
    Slot a = acquire(0, 256);
    Slot b = acquire(256, 256);
    auto* bytes_a = static_cast<std::uint8_t*>(a.data);
    auto* bytes_b = static_cast<std::uint8_t*>(b.data);
    std::memset(bytes_a, 0, 512);
    const auto finish = [](Stream& stream, std::uint8_t* bytes) {
      stream.submit([] {});  // one more delay
      stream.submit([bytes] { std::memset(bytes, 7, 256); });
      Event event;
      event.record(stream);
      return event;
    };
    pool.release(a, finish(*slow_a, bytes_a), filler);
    pool.release(b, finish(*slow_b, bytes_b), filler);
    // Covers both.
    Slot next = acquire(128, 256);
    int seen_a = -1;
    int seen_b = -1;
    filler->submit([&] {
      seen_a = bytes_a[255];
      seen_b = bytes_b[0];
    });
    filler->synchronize();
    EXPECT_EQ(seen_a, 7);
    EXPECT_EQ(seen_b, 7);
    release(next);
    // `next` covered neither of them: their ends are still waited for.
    Slot all = acquire(0, 1024);
    filler->synchronize();
    release(all);
  }
  EXPECT_EQ(pool.num_dynamic(), 0);
}

TEST_F(SlotPoolTest, AcquireDoesNotBlockTheHost) {
  const auto user = make_stream(at::kCPU, "user");
  std::promise<void> go;
  user->submit([wait = go.get_future().share()] { wait.wait(); });
  Event last_use;
  last_use.record(*user);
  Slot slot = acquire(0, 256);
  pool.release(slot, last_use, filler);
  slot = acquire(0, 256);  // would hang here
  EXPECT_EQ(slot.offset, 0);
  std::promise<void> filled;
  filler->submit([&] { filled.set_value(); });
  auto done = filled.get_future();
  EXPECT_EQ(
      done.wait_for(std::chrono::milliseconds(20)),
      std::future_status::timeout);
  go.set_value();
  done.wait();
  release(slot);
}

TEST_F(SlotPoolTest, B16_DynamicMemoryLivesUntilItsLastUse) {
  const auto user = make_stream(at::kCPU, "user");
  std::promise<void> go;
  user->submit([wait = go.get_future().share()] { wait.wait(); });
  Event last_use;
  last_use.record(*user);
  Slot slot = acquire(-1, 256);
  const at::Tensor memory = slot.dynamic;
  pool.release(slot, last_use, filler);
  std::promise<void> freed;
  filler->submit([&] { freed.set_value(); });
  EXPECT_EQ(
      freed.get_future().wait_for(std::chrono::milliseconds(20)),
      std::future_status::timeout);
  EXPECT_EQ(memory.use_count(), 2U);
  go.set_value();
  filler->synchronize();
  EXPECT_EQ(memory.use_count(), 1U);
}

TEST_F(SlotPoolTest, ReleasedTwice) {
  Slot slot = acquire(0, 256);
  release(slot);
  try {
    release(slot);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    EXPECT_THAT(error.message(), HasSubstr("released twice"));
  }
  EXPECT_EQ(pool.num_held(), 0);
}

TEST_F(SlotPoolTest, TheArenaChangesOnlyWhenNothingIsHeld) {
  Slot slot = acquire(0, 256);
  try {
    pool.set_arena(2048);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    EXPECT_THAT(error.message(), HasSubstr("only while no slot is in use"));
  }
  EXPECT_EQ(pool.arena_nbytes(), 1024);
  release(slot);
  pool.set_arena(2048);
  EXPECT_EQ(pool.arena_nbytes(), 2048);
  slot = acquire(1024, 1024);
  EXPECT_EQ(slot.offset, 1024);
  release(slot);
  pool.set_arena(0);
  EXPECT_EQ(pool.arena_nbytes(), 0);
}

TEST_F(SlotPoolTest, ANewArenaWaitsForLastUses) {
  const auto slow = slow_stream(1);
  Slot slot = acquire(0, 256);
  bool used = false;
  slow->submit([] {});
  slow->submit([&] { used = true; });
  Event last_use;
  last_use.record(*slow);
  pool.release(slot, last_use, filler);
  pool.set_arena(512);
  EXPECT_TRUE(used);
}

// The block of a buffer outside the arena belongs to the stream that fills it:
// freed there, it cannot be handed out while that stream still writes it.
TEST(SlotPoolCuda, B37_DynamicMemoryBelongsToItsFiller) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const at::Device gpu(at::kCUDA, 0);
  const auto filler = make_stream(gpu, "filler", {.max_delay_us = 5000});
  SlotPool pool(gpu);
  constexpr std::int64_t kBytes = 1 << 20;
  for (int round = 0; round < 20; ++round) {
    Slot slot = pool.acquire(-1, kBytes, filler);
    filler->submit([] {});  // one more delay
    filler->submit([memory = slot.data, gpu] {
      at::from_blob(
          memory,
          {kBytes},
          at::TensorOptions().dtype(at::kByte).device(gpu))
          .fill_(7);
    });
    Event last_use;
    last_use.record(*filler);
    pool.release(slot, last_use, filler);
    const at::Tensor next =
        at::zeros({kBytes}, at::TensorOptions().dtype(at::kByte).device(gpu));
    filler->synchronize();
    EXPECT_EQ(next.sum().item<std::int64_t>(), 0) << "round " << round;
  }
}

// The arena may get memory that compute still writes, and others fill it.
TEST(SlotPoolCuda, AnArenaIsNobodyElses) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const at::Device gpu(at::kCUDA, 0);
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(gpu);
  constexpr std::int64_t kBytes = 64 << 20;
  at::Tensor before = at::empty({kBytes}, bytes);
  const void* const block = before.data_ptr();
  for (int i = 0; i < 200; ++i) {
    before.fill_(i);  // all of them take milliseconds
  }
  before = at::Tensor();
  SlotPool pool(gpu);
  pool.set_arena(kBytes);
  const auto filler = make_stream(gpu, "filler");
  Slot slot = pool.acquire(0, kBytes, filler);
  ASSERT_EQ(slot.data, block);
  filler->submit([&] { at::from_blob(slot.data, {kBytes}, bytes).fill_(7); });
  filler->synchronize();
  current_stream(gpu)->synchronize();
  EXPECT_TRUE(
      at::from_blob(slot.data, {kBytes}, bytes).eq(7).all().item<bool>());
  pool.release(slot, Event(), filler);
}

}  // namespace
}  // namespace flatshard
