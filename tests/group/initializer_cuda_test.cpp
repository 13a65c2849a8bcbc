// The CUDA kernel against the CPU loop. Skips itself without a GPU.
#include "flatshard/device/stream.h"
#include "flatshard/group/initializer.h"

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <vector>

namespace flatshard {
namespace {

constexpr const char* kName = "layers.0.weight";

// Rows and columns of a matrix, and runs that start inside a block.
TEST(CudaInitializer, ValuesEqualTheHosts) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const std::vector<std::int64_t> shape{33, 70};
  const Rectangle boxes[] = {
      Rectangle::whole(shape),
      {{2, 0}, {7, 70}},
      {{1, 3}, {30, 9}},
      {{0, 69}, {33, 1}}};
  for (const InitSpec spec :
       {InitSpec::normal(0.1F, 2), InitSpec::uniform(-1, 1)}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const Rectangle& box : boxes) {
        const at::Tensor host = at::empty({box.numel()}, dtype);
        const at::Tensor gpu =
            at::empty({box.numel()}, host.options().device(at::kCUDA));
        for (const at::Tensor& out : {host, gpu}) {
          Initializer(7).fill(out, kName, spec, FlatRuns(shape, box));
        }
        EXPECT_TRUE(gpu.cpu().equal(host)) << to_string(box) << " " << dtype;
      }
    }
  }
  const at::Tensor far = at::empty({1 << 20}, at::kCUDA);
  const std::int64_t begin = (std::int64_t{1} << 35) + 1;
  const InitSpec standard = InitSpec::normal(0, 1);
  Initializer(7).fill(far, kName, standard, begin);
  const at::Tensor host = at::empty({far.numel()});
  Initializer(7).fill(host, kName, standard, begin);
  EXPECT_TRUE(far.cpu().equal(host));
}

}  // namespace
}  // namespace flatshard
