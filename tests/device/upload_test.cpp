#include "flatshard/device/upload.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "flatshard/device/stream.h"

namespace flatshard {
namespace {

class UploadTest : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == at::kCUDA && !cuda_available()) {
      GTEST_SKIP() << "no GPU";
    }
  }
  at::Device device() const {
    return GetParam() == at::kCUDA ? at::Device(at::kCUDA, 0) : at::kCPU;
  }
};

// Lengths about the piece of 8 MiB, and more pieces than threads.
TEST_P(UploadTest, EveryByteArrives) {
  for (const int threads : {1, 3}) {
    std::vector<at::Tensor> values;
    std::vector<at::Tensor> places;
    std::vector<BytesCopy> copies;
    for (const std::int64_t n : {0, 1, 5, 8 << 20, (8 << 20) + 1, 50 << 20}) {
      values.push_back(at::randint(0, 256, {n}, at::kByte));
      places.push_back(
          at::zeros({n + 2}, at::dtype(at::kByte).device(device())));
      copies.push_back(
          {static_cast<std::byte*>(places.back().data_ptr()) + 1,
           values.back().data_ptr(),
           n});
    }
    upload(copies, device(), threads);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const at::Tensor place = places[i].cpu();
      const std::int64_t n = values[i].numel();
      EXPECT_TRUE(place.narrow(0, 1, n).equal(values[i])) << n;
      EXPECT_EQ(place[0].item<int>(), 0) << n;
      EXPECT_EQ(place[n + 1].item<int>(), 0) << n;
    }
  }
}

TEST_P(UploadTest, NothingToCopy) {
  upload({}, device(), 4);
  fill_tensors({}, device(), 4);
}

// Parts of 1 value to 8 MiB, more parts than threads, and two dtypes.
TEST_P(UploadTest, ValuesAreReadAndConverted) {
  for (const auto to : {at::kFloat, at::kBFloat16}) {
    const at::Tensor values = at::randn({9 << 20}).to(at::kBFloat16);
    const at::Tensor place =
        at::zeros({values.numel() + 2}, at::dtype(to).device(device()));
    std::vector<TensorFill> fills;
    std::int64_t done = 0;
    for (const std::int64_t n : {1, 5, 4 << 20, (4 << 20) - 6, 1 << 20}) {
      const at::Tensor part = values.narrow(0, done, n);
      fills.push_back(
          {.to = place.narrow(0, 1 + done, n),
           .dtype = at::kBFloat16,
           .read = [part](std::span<std::byte> bytes) {
             ASSERT_EQ(bytes.size(), part.nbytes());
             std::memcpy(bytes.data(), part.data_ptr(), bytes.size());
           }});
      done += n;
    }
    ASSERT_EQ(done, values.numel());
    fill_tensors(fills, device(), 3);
    const at::Tensor found = place.cpu();
    EXPECT_TRUE(found.narrow(0, 1, done).equal(values.to(to)));
    EXPECT_EQ(found[0].item<float>(), 0);
    EXPECT_EQ(found[done + 1].item<float>(), 0);
  }
}

TEST_P(UploadTest, AFailedReadIsThrown) {
  const at::Tensor place = at::zeros({4}, device());
  const std::vector<TensorFill> fills{
      {.to = place, .read = [](std::span<std::byte>) {
         throw std::runtime_error("no such file");
       }}};
  EXPECT_THROW(fill_tensors(fills, device(), 2), std::runtime_error);
}

INSTANTIATE_TEST_SUITE_P(
    Devices,
    UploadTest,
    ::testing::Values(at::kCPU, at::kCUDA),
    [](const auto& test) { return at::DeviceTypeName(test.param, true); });

}  // namespace
}  // namespace flatshard
