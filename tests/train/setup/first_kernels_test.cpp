#include "flatshard/train/setup/first_kernels.h"

#include "flatshard/device/stream.h"

#include <gtest/gtest.h>

namespace flatshard {
namespace {

TEST(FirstKernels, CpusHaveNothingToLoad) {
  EXPECT_FALSE(load_first_kernels(at::kCPU, at::kBFloat16).valid());
}

TEST(FirstKernels, RunOnAGpuInEachDtype) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU, or a build without CUDA";
  }
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    EXPECT_NO_THROW(load_first_kernels({at::kCUDA, 0}, dtype).get()) << dtype;
  }
}

}  // namespace
}  // namespace flatshard
