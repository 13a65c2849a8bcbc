// Changed elements that the CUDA kernels find, against ATen on the same GPU.
// Skips itself without a GPU.
#include "flatshard/checkpoint/changed_elements.h"
#include "flatshard/device/memory.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

namespace flatshard {
namespace {

at::Tensor bits_of(const at::Tensor& values) {
  const auto size = values.element_size();
  return values.view(size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong);
}

// Returns values of random bits: numbers of any size, infinity, and NaN.
at::Tensor random_bits(std::int64_t n, at::ScalarType dtype, at::Generator& g) {
  const auto nbytes = n * static_cast<std::int64_t>(c10::elementSize(dtype));
  return at::randint(0, 256, {nbytes}, g, at::kByte).view(dtype);
}

// Replaces each element with the probability `part`.
void change(const at::Tensor& values, double part, at::Generator& g) {
  const at::Tensor other =
      random_bits(values.numel(), values.scalar_type(), g).cuda();
  const at::Tensor chosen =
      at::rand({values.numel()}, g, at::kDouble).lt(part).cuda();
  bits_of(values).copy_(at::where(chosen, bits_of(other), bits_of(values)));
}

// Checks the elements of each run between two borders.
void expect_elements(
    const ChangedElements& changed,
    const at::Tensor& differs,
    const at::Tensor& now,
    const std::vector<std::int64_t>& borders) {
  changed.counted.synchronize();
  EXPECT_TRUE(bits_of(changed.copy).equal(bits_of(now)));
  const auto* num_before = changed.num_before.const_data_ptr<std::int64_t>();
  EXPECT_EQ(num_before[0], 0);
  for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
    const ElementRun run{
        .begin = borders[i],
        .end = borders[i + 1],
        .num_before = num_before[i],
        .shift = 7 - borders[i]};
    const at::Tensor elements =
        differs.slice(0, run.begin, run.end).nonzero().view(-1);
    ASSERT_EQ(num_before[i + 1] - num_before[i], elements.numel());
    const at::Tensor indices =
        at::empty_like(elements, i % 2 == 0 ? at::kInt : at::kLong);
    const at::Tensor values =
        at::empty({elements.numel()}, changed.copy.options());
    list_elements(changed, run, indices, values);
    EXPECT_TRUE(indices.to(at::kLong).equal(elements + 7));
    EXPECT_TRUE(bits_of(values).equal(
        bits_of(now).index_select(0, elements + run.begin)));
  }
}

class CudaChangedElements : public ::testing::TestWithParam<
                                std::tuple<at::ScalarType, at::ScalarType>> {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU";
    }
  }
};

TEST_P(CudaChangedElements, OfAnySizeStartAndNumber) {
  const auto [dtype, copy_dtype] = GetParam();
  auto g = at::detail::createCPUGenerator(5);
  for (const std::int64_t n :
       {0, 1, 31, 32, 33, 127, 129, 1023, 1024, 1025, 5000, 300001}) {
    for (const std::int64_t start : {0, 1, 4}) {
      for (const double part : {0.0, 0.03, 0.1, 0.6, 1.0}) {
        SCOPED_TRACE(
            ::testing::Message()
            << n << " elements from " << start << ", " << part);
        const at::Tensor now =
            random_bits(start + n, dtype, g).cuda().narrow(0, start, n);
        const at::Tensor copy =
            at::empty({start + n}, now.options().dtype(copy_dtype))
                .narrow(0, start, n);
        copy.copy_(now);
        change(now, part, g);
        const std::vector<std::int64_t>
            borders{0, n / 7, n / 3, n / 3, n - n / 5, n};
        const at::Tensor on_gpu = at::tensor(borders, at::kLong).cuda();
        at::Tensor differs = bits_of(now.to(copy_dtype)).ne(bits_of(copy));
        const auto first = compare_elements(now, copy, {}, on_gpu);
        expect_elements(first, differs, now.to(copy_dtype), borders);

        // Elements that were changed before, and more.
        change(now, 0.01, g);
        differs.logical_or_(bits_of(now.to(copy_dtype)).ne(bits_of(copy)));
        const auto both = compare_elements(now, copy, first.marks, on_gpu);
        expect_elements(both, differs, now.to(copy_dtype), borders);
      }
    }
  }
}

TEST_P(CudaChangedElements, ZeroAndNaNByTheirBits) {
  const auto [dtype, copy_dtype] = GetParam();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor now =
      at::tensor({0.0, -0.0, nan, nan, 1.0}, at::kDouble).to(dtype).cuda();
  const at::Tensor copy = at::tensor({-0.0, -0.0, nan, 1.0, nan}, at::kDouble)
                              .to(dtype)
                              .cuda()
                              .to(copy_dtype);
  const at::Tensor borders = at::tensor({0, 1, 2, 3, 4, 5}, at::kLong).cuda();
  const auto changed = compare_elements(now, copy, {}, borders);
  changed.counted.synchronize();
  EXPECT_TRUE(
      changed.num_before.equal(at::tensor({0, 1, 1, 1, 2, 3}, at::kLong)));
}

// ATen compares the last pair.
INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    CudaChangedElements,
    ::testing::Values(
        std::tuple(at::kFloat, at::kFloat),
        std::tuple(at::kFloat, at::kBFloat16),
        std::tuple(at::kFloat, at::kHalf),
        std::tuple(at::kBFloat16, at::kFloat),
        std::tuple(at::kBFloat16, at::kBFloat16),
        std::tuple(at::kBFloat16, at::kHalf),
        std::tuple(at::kHalf, at::kFloat),
        std::tuple(at::kHalf, at::kBFloat16),
        std::tuple(at::kHalf, at::kHalf),
        std::tuple(at::kDouble, at::kFloat)));

TEST(CudaChangedElements, OfMoreThan2To31) {
  constexpr std::int64_t kNumel = (1LL << 31) + 1000;
  constexpr std::int64_t kNeeded = 16LL << 30;
  if (!cuda_available() ||
      memory_stats(at::Device(at::kCUDA, 0)).capacity_bytes < kNeeded) {
    GTEST_SKIP() << "no GPU with " << kNeeded << " bytes";
  }
  const at::Tensor now =
      at::zeros({kNumel}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
  const at::Tensor copy = now.clone();
  const std::vector<std::int64_t> elements{
      3,
      (1LL << 31) - 1,
      1LL << 31,
      kNumel - 1};
  const at::Tensor expected = at::tensor(elements, at::kLong).cuda();
  now.index_fill_(0, expected, 2);
  const auto changed = compare_elements(
      now,
      copy,
      {},
      at::tensor({std::int64_t{0}, kNumel}, at::kLong).cuda());
  changed.counted.synchronize();
  ASSERT_EQ(changed.num_before[1].item<std::int64_t>(), 4);
  const at::Tensor indices = at::empty_like(expected);
  const at::Tensor values = at::empty({4}, copy.options());
  list_elements(changed, {.begin = 0, .end = kNumel}, indices, values);
  EXPECT_TRUE(indices.equal(expected));
  EXPECT_TRUE(values.eq(2).all().item<bool>());
}

}  // namespace
}  // namespace flatshard
