#include "flatshard/device/parallel_for.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>

namespace flatshard {
namespace {

using std::chrono_literals::operator""s;

class ParallelFor : public ::testing::Test {
 protected:
  void TearDown() override { set_host_threads(before_); }

 private:
  int before_ = host_threads();
};

TEST_F(ParallelFor, CallsForEachElementOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    set_host_threads(threads);
    for (const std::int64_t n : {0, 1, 2, 5, 100, 1001}) {
      for (const std::int64_t grain : {1, 10, 5000}) {
        std::vector<int> calls(static_cast<std::size_t>(n));
        parallel_for(3, 3 + n, grain, [&](std::int64_t from, std::int64_t to) {
          for (std::int64_t i = from; i < to; ++i) {
            ++calls[static_cast<std::size_t>(i - 3)];
          }
        });
        EXPECT_EQ(calls, std::vector<int>(calls.size(), 1))
            << n << " by " << grain << " on " << threads;
      }
    }
  }
}

TEST_F(ParallelFor, TheThreadsRunTogether) {
  set_host_threads(3);
  std::mutex mutex;
  std::condition_variable came;
  int num_here = 0;
  int num_met = 0;
  parallel_for(0, 3, 1, [&](std::int64_t, std::int64_t) {
    std::unique_lock lock(mutex);
    ++num_here;
    came.notify_all();
    // A loop waits in vain: the second call comes after the first.
    num_met += came.wait_for(lock, 20s, [&] { return num_here == 3; }) ? 1 : 0;
  });
  EXPECT_EQ(num_met, 3);
}

TEST_F(ParallelFor, NoMoreThreadsThanGrains) {
  set_host_threads(4);
  std::mutex mutex;
  std::set<std::int64_t> begins;
  parallel_for(0, 25, 10, [&](std::int64_t from, std::int64_t) {
    const std::lock_guard lock(mutex);
    begins.insert(from);
  });
  EXPECT_EQ(begins.size(), 3U);
}

}  // namespace
}  // namespace flatshard
