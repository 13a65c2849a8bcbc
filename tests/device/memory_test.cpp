#include "flatshard/device/memory.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/device/host_threads.h"
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

// Runs once on a separate stream that copies all in one call, and once on the
// default stream.
TEST(CopyBytes, ManyAtOnceAmongThemEmptyOnes) {
  const at::Device device =
      cuda_available() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  const at::Tensor from =
      at::arange(1000, at::kInt).view(at::kByte).contiguous().to(device);
  for (const bool own_stream : {false, true}) {
    const at::Tensor to = at::zeros_like(from);
    auto* const first = static_cast<char*>(to.mutable_data_ptr());
    const auto* const source = static_cast<const char*>(from.const_data_ptr());
    std::vector<BytesCopy> copies{{.to = first, .from = source, .nbytes = 0}};
    for (std::int64_t at = 0; at < from.numel(); at += 7) {
      const std::int64_t nbytes = std::min<std::int64_t>(7, from.numel() - at);
      copies.push_back(
          {.to = first + from.numel() - at - nbytes,
           .from = source + at,
           .nbytes = nbytes});
    }
    const auto copy = [&] { copy_bytes(copies, device); };
    if (own_stream) {
      const auto stream = make_stream(device, "copies", {});
      Event ready;
      ready.record(*current_stream(device));
      ready.wait(*stream);
      stream->submit(copy);
      Event done;
      done.record(*stream);
      done.wait(*current_stream(device));
    } else {
      copy();
    }
    copy_bytes(std::span<const BytesCopy>(), device);
    const at::Tensor whole = at::cat(
        {from.narrow(0, from.numel() - 3, 3),
         from.narrow(0, 0, from.numel() - 3).view({-1, 7}).flip(0).flatten()});
    EXPECT_TRUE(to.equal(whole)) << own_stream;
  }
}

TEST(HostThreads, SetsTheCallersCount) {
  set_host_threads(1);
  EXPECT_EQ(host_threads(), 1);
}

}  // namespace
}  // namespace flatshard
