#include "flatshard/core/share_work.h"

#include <gtest/gtest.h>

#include <latch>
#include <stdexcept>

namespace flatshard {
namespace {

TEST(ShareWork, DoesEachItemOnce) {
  for (const int threads : {-1, 1, 2, 5}) {
    for (const std::size_t n : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> calls(n);
      share_work(n, threads, [&] {
        return [&](std::size_t i) { ++calls[i]; };
      });
      for (std::size_t i = 0; i < n; ++i) {
        EXPECT_EQ(calls[i], 1) << i << " of " << n << " on " << threads;
      }
    }
  }
}

TEST(ShareWork, TheThreadsRunTogetherAndEachHasAWorker) {
  std::latch all(3);  // one thread alone would wait here for ever
  std::atomic<int> workers = 0;
  share_work(3, 3, [&] {
    ++workers;
    return [&](std::size_t) { all.arrive_and_wait(); };
  });
  EXPECT_EQ(workers, 3);
}

TEST(ShareWork, TheFirstErrorEndsAll) {
  std::atomic<int> done = 0;
  const auto run = [&] {
    share_work(1000, 2, [&] {
      return [&](std::size_t i) {
        if (i == 0) {
          throw std::runtime_error("item 0");
        }
        ++done;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      };
    });
  };
  EXPECT_THROW(run(), std::runtime_error);
  EXPECT_LT(done, 500);
  EXPECT_THROW(
      share_work(
          5,
          3,
          []() -> void (*)(std::size_t) {
            throw std::logic_error("no worker");
          }),
      std::logic_error);
}

}  // namespace
}  // namespace flatshard
