#include "flatshard/device/memory.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/device/host_threads.h"
#include "flatshard/device/nvtx.h"
#include "flatshard/device/stream.h"

namespace flatshard {
namespace {

TEST(MemoryStats, CpuIsTheResidentSet) {
  const MemoryStats before = memory_stats(at::kCPU);
  EXPECT_GT(before.allocated_bytes, 0);
  EXPECT_GE(before.peak_allocated_bytes, before.allocated_bytes);
  EXPECT_GT(before.capacity_bytes, before.allocated_bytes);
  constexpr std::int64_t kBytes = 64 << 20;
  const at::Tensor block = at::ones({kBytes}, at::kByte);
  const MemoryStats after = memory_stats(at::kCPU);
  // Other pages may go meanwhile, so half of the block is enough.
  EXPECT_GT(after.allocated_bytes, before.allocated_bytes + kBytes / 2);
  EXPECT_EQ(block[0].item<int>(), 1);
}

TEST(MemoryStats, CudaCountsTensors) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const at::Device device(at::kCUDA, 0);
  const MemoryStats before = memory_stats(device);
  const at::Tensor block = at::ones({1 << 20}, at::device(device));
  const MemoryStats after = memory_stats(device);
  EXPECT_EQ(after.allocated_bytes - before.allocated_bytes, 4 << 20);
  EXPECT_GE(after.reserved_bytes, after.allocated_bytes);
}

TEST(MemoryStats, OtherDevicesAreRefusedByName) {
  try {
    memory_stats(at::Device(at::kMeta));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'meta'"));
  }
}

TEST(HostThreads, SetsTheCallersCount) {
  set_host_threads(1);
  EXPECT_EQ(host_threads(), 1);
}

TEST(Nvtx, RangesNestWithoutAProfiler) {
  const NvtxRange outer("outer");
  const NvtxRange inner(std::string("inner"));
}

}  // namespace
}  // namespace flatshard
