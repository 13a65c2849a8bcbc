#include "flatshard/runtime/kept_activations.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

constexpr CallId kCall = 7;

StreamOptions delayed(std::uint64_t seed) {
  return {.delay_seed = seed, .max_delay_us = 3000};
}

at::Tensor numbers(std::int64_t n) {
  return at::arange(n, at::kFloat);
}

// The program overwrites the memory as soon as it may, and the copies are late.
TEST(KeptActivations, L6_MemoryIsFreeAfterItsCopy) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    KeptActivations kept(at::kCPU, delayed(seed));
    const at::Tensor tensor = numbers(1000);
    const std::size_t number = kept.add(kCall, tensor);
    kept.download(kCall);
    kept.drain_download(kCall);
    tensor.zero_();
    kept.upload(kCall);
    kept.await_upload(kCall);
    EXPECT_TRUE(kept.tensor(kCall, number).equal(numbers(1000)));
    kept.release(kCall);
    EXPECT_EQ(kept.num_calls(), 0U);
  }
}

// The last call's tensors stay on the device, so compute has not waited for
// their download before.
TEST(KeptActivations, L6_MemoryIsFreeAfterARelease) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    KeptActivations kept(at::kCPU, delayed(seed));
    const at::Tensor tensor = numbers(128);
    kept.add(kCall, tensor);
    kept.download(kCall);
    kept.release(kCall);
    tensor.zero_();
    // The next call has the same place. Its first number is the same, and its
    // padding has the rest.
    kept.add(kCall + 1, numbers(1));
    kept.download(kCall + 1);
    kept.drain_download(kCall + 1);
    kept.upload(kCall + 1);
    kept.await_upload(kCall + 1);
    const at::Tensor place =
        kept.tensor(kCall + 1, 0).as_strided({128}, {1}, 0);
    EXPECT_TRUE(place.equal(numbers(128)));
  }
}

// Calls that keep activations at the same time have separate places, and later
// steps use them again.
TEST(KeptActivations, L6_PlacesOnTheHostAreApart) {
  KeptActivations kept(at::kCPU, delayed(1));
  for (int step = 0; step < 3; ++step) {
    for (CallId call = 0; call < 4; ++call) {
      kept.add(call, numbers(100) + call + step);
      kept.download(call);
      if (call > 0) {
        kept.drain_download(call - 1);
      }
    }
    for (CallId call = 3; call >= 0; --call) {
      if (call < 3) {
        kept.upload(call);
        kept.await_upload(call);
      }
      EXPECT_TRUE(kept.tensor(call, 0).equal(numbers(100) + call + step));
      kept.release(call);
    }
    // The second step has the places of the first one.
    EXPECT_EQ(kept.host_nbytes(), 4 * 512);
  }
}

TEST(KeptActivations, LargerCallsGetLargerPlaces) {
  KeptActivations kept(at::kCPU, delayed(1));
  for (const std::int64_t n : {10, 1000, 100}) {
    kept.add(kCall, numbers(n));
    kept.download(kCall);
    kept.drain_download(kCall);
    kept.upload(kCall);
    kept.await_upload(kCall);
    EXPECT_TRUE(kept.tensor(kCall, 0).equal(numbers(n)));
    kept.release(kCall);
  }
  EXPECT_EQ(kept.host_nbytes(), 4096);
}

TEST(KeptActivations, TensorsComeBackWithTheirLayout) {
  KeptActivations kept(at::kCPU, {});
  const at::Tensor permuted =
      numbers(24).view({2, 3, 4}).permute({2, 0, 1}).to(at::kBFloat16);
  ASSERT_FALSE(permuted.is_contiguous());
  kept.add(kCall, numbers(5));
  const std::size_t number = kept.add(kCall, permuted);
  kept.download(kCall);
  kept.drain_download(kCall);
  kept.upload(kCall);
  kept.await_upload(kCall);
  const at::Tensor got = kept.tensor(kCall, number);
  EXPECT_EQ(got.strides(), permuted.strides());
  EXPECT_EQ(got.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(got.equal(permuted));
}

TEST(KeptActivations, OnlyDenseNumbersOfItsDeviceLeave) {
  const KeptActivations kept(at::kCPU, {});
  EXPECT_TRUE(kept.can_leave(numbers(4)));
  EXPECT_TRUE(kept.can_leave(numbers(4).view({2, 2}).t()));
  EXPECT_FALSE(kept.can_leave(at::Tensor()));
  EXPECT_FALSE(kept.can_leave(at::arange(4)));
  EXPECT_FALSE(kept.can_leave(numbers(0)));
  EXPECT_FALSE(kept.can_leave(numbers(4).slice(0, 0, 4, 2)));
  EXPECT_FALSE(kept.can_leave(numbers(1).expand({4})));
  EXPECT_FALSE(kept.can_leave(numbers(4).to(at::kMeta)));
}

TEST(KeptActivations, AWriteIntoWhatIsKeptIsAnError) {
  KeptActivations kept(at::kCPU, {});
  const at::Tensor tensor = numbers(4);
  kept.add(kCall, tensor);
  kept.download(kCall);
  tensor.add_(1);
  for (const bool drains : {false, true}) {
    try {
      drains ? kept.drain_download(kCall) : (void)kept.tensor(kCall, 0);
      FAIL() << "expected an error";
    } catch (const Error& e) {
      EXPECT_THAT(
          e.what(),
          ::testing::HasSubstr("was modified in place after the part had read "
                               "it"));
    }
  }
}

TEST(KeptActivations, L7_NothingIsLeftAfterAReset) {
  KeptActivations kept(at::kCPU, delayed(3));
  kept.add(kCall, numbers(100));
  kept.download(kCall);
  kept.reset();
  EXPECT_EQ(kept.num_calls(), 0U);
  kept.release(kCall);  // of a graph that ends later
  EXPECT_THROW(kept.tensor(kCall, 0), Error);
  kept.add(kCall + 1, numbers(100));
  kept.download(kCall + 1);
  kept.drain_download(kCall + 1);
  EXPECT_EQ(kept.host_nbytes(), 512);
}

}  // namespace
}  // namespace flatshard
