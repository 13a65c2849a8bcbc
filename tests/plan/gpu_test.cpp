#include "flatshard/plan/gpu.h"

#include "flatshard/core/error.h"
#include "flatshard/plan/kernel.h"
#include "tests/plan/round_gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard::plan {
namespace {

using ::testing::HasSubstr;

std::string message_of_parse(const std::string& text) {
  try {
    parse_gpu(text, "my.toml");
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(Curve, InterpolatesInTheLogarithmOfTheSize) {
  const Curve curve{.sizes = {1, 4, 16}, .rates = {10, 20, 40}};
  EXPECT_DOUBLE_EQ(curve.at(4), 20);
  EXPECT_DOUBLE_EQ(curve.at(2), 15);
  EXPECT_DOUBLE_EQ(curve.at(8), 30);
  EXPECT_DOUBLE_EQ(curve.at(1000), 40);
  // Half the size has the same time as the smallest size, so half the rate.
  EXPECT_DOUBLE_EQ(curve.at(0.5), 5);
}

TEST(ProductRates, InterpolatesAlongEachSize) {
  const ProductRates rates{
      .m = {1, 4},
      .n = {1, 4},
      .k = {1},
      .tflops = {10, 20, 30, 40}};
  EXPECT_DOUBLE_EQ(rates.at(1, 1, 1), 10);
  EXPECT_DOUBLE_EQ(rates.at(1, 4, 1), 20);
  EXPECT_DOUBLE_EQ(rates.at(4, 1, 1), 30);
  EXPECT_DOUBLE_EQ(rates.at(2, 2, 1), 25);
  EXPECT_DOUBLE_EQ(rates.at(4, 4, 8), 40);
}

TEST(Kernel, PricesByHand) {
  const Gpu gpu = round_gpu();
  // 2 * 100 * 200 * 50 = 2e6 FLOPs at 1e12.
  EXPECT_DOUBLE_EQ(
      Kernel::matmul(Product::forward, 100, 200, 50).seconds(gpu),
      2e-6);
  EXPECT_DOUBLE_EQ(
      Kernel::matmul(Product::dgrad, 100, 200, 50, "rowwise").seconds(gpu),
      1e-6);
  EXPECT_DOUBLE_EQ(
      Kernel::experts(Product::wgrad, 3, 100, 200, 50).seconds(gpu),
      6e-6);
  // 2 matmuls of 2 T^2 / 2 d, of 4 heads.
  EXPECT_DOUBLE_EQ(
      Kernel::attention(false, 1, 4, 1000, 128).flops(),
      2 * 4 * 1e6 * 128);
  EXPECT_DOUBLE_EQ(
      Kernel::attention(true, 1, 4, 1000, 128).seconds(gpu),
      5 * 4 * 1e6 * 128 / 1e12);
  EXPECT_DOUBLE_EQ(Kernel::memory("norm", 3e9).seconds(gpu), 3);
}

TEST(Gpu, ReadsWhatItWrote) {
  for (const std::string_view name : {"h100", "h200"}) {
    const Gpu gpu = find_gpu(std::string(name));
    const Gpu again = parse_gpu(to_toml(gpu), "again");
    EXPECT_EQ(again.name, gpu.name);
    EXPECT_EQ(again.attention.size(), gpu.attention.size());
    EXPECT_NEAR(
        again.product_seconds(Product::forward, 8192, 4096, 4096) /
            gpu.product_seconds(Product::forward, 8192, 4096, 4096),
        1,
        1e-4);
  }
}

TEST(Gpu, TablesOfDataSheetsSaySo) {
  for (const std::string_view name : gpu_names()) {
    const Gpu gpu = find_gpu(std::string(name));
    EXPECT_GT(gpu.peak_bf16_tflops, 0) << name;
    EXPECT_GT(gpu.memory_gib, 30) << name;
    EXPECT_GT(gpu.nvlink.copies.at(1e9), 10) << name;
    if (name != "h200") {
      EXPECT_THAT(gpu.source, HasSubstr("not measured")) << name;
    }
  }
  EXPECT_TRUE(find_gpu("a100").float8.empty());
  // Twice the peak rate is half the time.
  EXPECT_NEAR(
      find_gpu("h100").product_seconds(Product::forward, 8192, 8192, 8192) /
          find_gpu("b200").product_seconds(Product::forward, 8192, 8192, 8192),
      2250.0 / 989.0,
      0.01);
}

TEST(Gpu, DevicesHaveTables) {
  EXPECT_EQ(table_of_device("NVIDIA H100 80GB HBM3"), "h100");
  EXPECT_EQ(table_of_device("NVIDIA H200"), "h200");
  EXPECT_EQ(table_of_device("NVIDIA A100-SXM4-80GB"), "a100");
  for (const char* other :
       {"NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GB200",
        "NVIDIA L40S",
        "CPU"}) {
    EXPECT_EQ(table_of_device(other), "") << other;
  }
}

TEST(Gpu, RefusesBadTables) {
  EXPECT_THAT(message_of_parse("name = \"x\""), HasSubstr("expected the key"));
  EXPECT_THAT(
      message_of_parse("base = \"h100\"\nmemry_gib = 3"),
      HasSubstr("did you mean memory_gib?"));
  EXPECT_THAT(
      message_of_parse("base = \"h100\"\nmemory_gib = -3"),
      HasSubstr("memory_gib expected positive numbers"));
  EXPECT_THAT(
      message_of_parse("base = \"h300\""),
      HasSubstr("expected a GPU, one of h100, h200, b200, a100"));
  EXPECT_THAT(
      message_of_parse("base = \"h100\"\nnvlink.copies.sizes = [2, 1]"),
      HasSubstr("nvlink.copies.sizes expected ascending sizes"));
  EXPECT_THAT(
      message_of_parse("base = \"h100\"\nproducts.forward.m = [1]"),
      HasSubstr("one for each m, n and k"));
  EXPECT_THAT(
      message_of_parse("[scale]\nproducts = 2"),
      HasSubstr("add base = \"h100\""));
  EXPECT_THAT(message_of_parse("base = "), HasSubstr("my.toml:1: expected"));
  EXPECT_THAT(message_of_parse("a.\xff = 1"), HasSubstr("my.toml"));
}

TEST(Gpu, FindsTablesByNameOrPath) {
  try {
    find_gpu("h10");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean h100?"));
    EXPECT_THAT(error.what(), HasSubstr("--calibrate"));
  }
  try {
    round_gpu().product_seconds(Product::forward, 1, 1, 1, "mxfp8");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no rates of the FP8 recipe mxfp8"));
  }
}

}  // namespace
}  // namespace flatshard::plan
