#include "check.h"
#include "flatshard/device/stream.h"
#include "flatshard/float8/requantize.h"

#include <fmt/format.h>

#include <limits>

// Bytes of the CUDA kernels against the CPU. Skips itself without a GPU.
namespace flatshard::float8 {
namespace {

class Float8Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
  }
};

std::vector<Quantizer> quantizers() {
  std::vector<Quantizer> all;
  for (const Recipe recipe : kRecipes) {
    for (const Format format : {Format::e4m3, Format::e5m2}) {
      all.push_back({recipe, format});
      if (has_power_of_two_scales(recipe)) {
        all.push_back({recipe, format, Rounding::floor});
      }
    }
  }
  return all;
}

void expect_same(const Plane& got, const Plane& want, const char* what) {
  SCOPED_TRACE(what);
  EXPECT_TRUE(got.data.is_cuda());
  expect_same_bytes(got.data, want.data, "data");
  expect_same_bytes(got.scales, want.scales, "scales");
  EXPECT_EQ(got.scales.strides(), want.scales.strides());
}

// Every plane of x [rows, columns], there and here.
void expect_all_planes(
    const at::Tensor& x,
    const Quantizer& q,
    std::int64_t multiple = 1) {
  const at::Tensor there = x.to(at::kCUDA);
  expect_same(quantize(there, q), quantize(x, q), "row");
  const PlaneOptions turned{.axis = Axis::column, .multiple = multiple};
  expect_same(quantize(there, q, turned), quantize(x, q, turned), "column");
  if (multiple == 1) {
    const PlaneOptions lying{.axis = Axis::column, .transpose = false};
    expect_same(quantize(there, q, lying), quantize(x, q, lying), "lying");
  }
  const auto got = quantize_both(there, q, multiple);
  const auto want = quantize_both(x, q, multiple);
  expect_same(got.first, want.first, "row of both");
  expect_same(got.second, want.second, "column of both");
}

TEST_F(Float8Cuda, EveryPlaneOfEveryRecipe) {
  for (const Quantizer& q : quantizers()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [rows, columns] :
           {std::pair{128, 128}, {256, 384}, {1024, 640}}) {
        SCOPED_TRACE(
            describe(q) + " " + c10::toString(dtype) + " " +
            std::to_string(rows) + " x " + std::to_string(columns));
        expect_all_planes(any_values(rows, columns, rows).to(dtype), q);
      }
    }
  }
}

// Rows and columns that fill no tile, and starts that 16-byte loads miss.
TEST_F(Float8Cuda, OddShapes) {
  for (const Recipe recipe : {Recipe::tensorwise, Recipe::rowwise}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& [rows, columns] :
           {std::pair{1, 1},
            {1, 1000},
            {3, 7},
            {77, 130},
            {130, 77},
            {200, 264},
            {5, 40000}}) {
        SCOPED_TRACE(
            std::string(to_string(recipe)) + " " + c10::toString(dtype) + " " +
            std::to_string(rows) + " x " + std::to_string(columns));
        const at::Tensor x = any_values(rows, columns, columns).to(dtype);
        expect_all_planes(x, {recipe});
        expect_all_planes(x, {recipe}, 16);
      }
    }
  }
  for (const Recipe recipe : {Recipe::blockwise_1x128, Recipe::mxfp8}) {
    for (const std::int64_t rows : {1, 31, 77, 129, 200}) {
      SCOPED_TRACE(std::string(to_string(recipe)) + std::to_string(rows));
      const at::Tensor x = any_values(rows, 256, rows).to(at::kBFloat16);
      const at::Tensor there = x.to(at::kCUDA);
      expect_same(quantize(there, {recipe}), quantize(x, {recipe}), "row");
      expect_all_planes(x, {recipe}, 16);
      expect_all_planes(x, {recipe}, 128);
    }
  }
  const at::Tensor x = any_values(65, 64, 1).flatten().narrow(0, 1, 64 * 64);
  const at::Tensor there = any_values(65, 64, 1).to(at::kCUDA).flatten();
  expect_same(
      quantize(there.narrow(0, 1, 64 * 64).view({64, 64}), {}),
      quantize(x.view({64, 64}), {}),
      "unaligned");
}

TEST_F(Float8Cuda, AllBfloat16Values) {
  at::Tensor codes = at::arange(1 << 16, at::kInt).to(at::kShort);
  const at::Tensor x = codes.view(at::kBFloat16).view({512, 128});
  const at::Tensor there = x.to(at::kCUDA);
  for (const Format format : {Format::e4m3, Format::e5m2}) {
    // A scale of one, whatever is in the tensor.
    const float largest = traits_of(format).largest;
    const at::Tensor one = at::full({}, largest);
    const Quantizer q{.format = format};
    expect_same(
        quantize(there, q, {.amax = one.to(at::kCUDA)}),
        quantize(x, q, {.amax = one}),
        "row");
    const PlaneOptions turned{.axis = Axis::column, .amax = one};
    expect_same(
        quantize(there, q, {.axis = Axis::column, .amax = one.to(at::kCUDA)}),
        quantize(x, q, turned),
        "column");
  }
  // Blocks with Inf and NaN.
  for (const Recipe recipe : kRecipes) {
    SCOPED_TRACE(to_string(recipe));
    expect_all_planes(x, {recipe});
  }
}

TEST_F(Float8Cuda, TenMillionFloats) {
  at::Generator generator = seeded(11);
  const at::Tensor bits = at::randint(
      std::numeric_limits<std::int32_t>::min(),
      std::numeric_limits<std::int32_t>::max(),
      {78125, 128},
      generator,
      at::kInt);
  const at::Tensor x = bits.view(at::kFloat);
  for (const Format format : {Format::e4m3, Format::e5m2}) {
    const at::Tensor one = at::full({}, traits_of(format).largest);
    expect_same(
        quantize(x.to(at::kCUDA), {.format = format}, {.amax = one.cuda()}),
        quantize(x, {.format = format}, {.amax = one}),
        "any bits");
  }
  // Blocks without Inf and NaN, of any magnitude.
  const at::Tensor finite = bits.bitwise_and(~(1 << 23)).view(at::kFloat);
  for (const Quantizer& q : quantizers()) {
    if (q.recipe != Recipe::blockwise) {
      SCOPED_TRACE(describe(q));
      expect_same(quantize(finite.cuda(), q), quantize(finite, q), "finite");
    }
  }
}

TEST_F(Float8Cuda, AmaxAndGivenScales) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t n : {0, 1, 7, 4096, 1000003}) {
      const at::Tensor x = at::randn({n}, seeded(n + 1)).to(dtype);
      expect_same_bytes(amax_of(x.to(at::kCUDA)), amax_of(x), "amax");
    }
  }
  const at::Tensor bad = at::tensor({1.0F, NAN, 3.0F});
  EXPECT_TRUE(std::isnan(amax_of(bad.to(at::kCUDA)).item<float>()));
  const at::Tensor x = any_values(256, 256, 12);
  const Quantizer mx{Recipe::mxfp8};
  const at::Tensor scales = quantize(x * 3, mx).scales;
  expect_same(
      quantize(x.to(at::kCUDA), mx, {.scales = scales.to(at::kCUDA)}),
      quantize(x, mx, {.scales = scales}),
      "mxfp8");
  const Quantizer blocks{Recipe::blockwise};
  const at::Tensor grid = quantize(x * 3, blocks).scales;
  const at::Tensor grid_there = at::empty_strided(
                                    grid.sizes(),
                                    grid.strides(),
                                    grid.options().device(at::kCUDA))
                                    .copy_(grid);
  expect_same(
      quantize(x.to(at::kCUDA), blocks, {.scales = grid_there}),
      quantize(x, blocks, {.scales = grid}),
      "blockwise");
  const at::Tensor rows = std::get<0>(x.abs().max(1)) * 2;
  expect_same(
      quantize(x.cuda(), {Recipe::rowwise}, {.amax = rows.cuda()}),
      quantize(x, {Recipe::rowwise}, {.amax = rows}),
      "rowwise");
}

TEST_F(Float8Cuda, EmptyTensors) {
  for (const Recipe recipe : kRecipes) {
    SCOPED_TRACE(to_string(recipe));
    expect_all_planes(at::empty({0, 128}), {recipe});
    expect_all_planes(at::empty({128, 0}), {recipe});
  }
}

TEST_F(Float8Cuda, Dequantize) {
  for (const Quantizer& q : quantizers()) {
    for (const bool transpose : {true, false}) {
      for (const Axis axis : {Axis::row, Axis::column}) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
          SCOPED_TRACE(describe(q));
          const at::Tensor x = any_values(256, 384, 13);
          const PlaneOptions to{.axis = axis, .transpose = transpose};
          const DequantizeOptions from{axis, transpose, dtype};
          expect_same_bytes(
              dequantize(quantize(x.to(at::kCUDA), q, to), q.recipe, from),
              dequantize(quantize(x, q, to), q.recipe, from),
              "values");
        }
      }
    }
  }
  const at::Tensor odd = any_values(77, 130, 14);
  expect_same_bytes(
      dequantize(quantize(odd.cuda(), {}), Recipe::tensorwise),
      dequantize(quantize(odd, {}), Recipe::tensorwise),
      "odd");
  // All codes, NaN too.
  for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const at::Tensor codes =
        at::arange(256, at::kInt).to(at::kByte).view({16, 16}).view(dtype);
    const at::Tensor one = at::ones({});
    const at::Tensor got =
        dequantize({codes.cuda(), one.cuda()}, Recipe::tensorwise).cpu();
    const at::Tensor want = dequantize({codes, one}, Recipe::tensorwise);
    EXPECT_TRUE(at::equal(got.isnan(), want.isnan()));
    EXPECT_TRUE(at::equal(got.nan_to_num(1e9), want.nan_to_num(1e9)));
  }
}

// A kernel reads rows of a multiple of 8; others are dequantized.
TEST_F(Float8Cuda, RowsThatAreQuantizedAlongColumns) {
  for (const Recipe recipe : {Recipe::rowwise, Recipe::mxfp8}) {
    for (const Rounding rounding : {Rounding::up, Rounding::floor}) {
      for (const auto& [rows, columns] :
           {std::pair{1, 8}, {77, 136}, {130, 72}, {96, 20}, {512, 384}}) {
        if (recipe == Recipe::mxfp8 && (rows % 32 != 0 || columns % 32 != 0)) {
          continue;
        }
        const Quantizer q{recipe, Format::e4m3, rounding};
        SCOPED_TRACE(describe(q) + fmt::format(" {} x {}", rows, columns));
        const Plane x = quantize(any_values(rows, columns, 15), q);
        const PlaneOptions along{.axis = Axis::column};
        const auto requantized = [&](at::DeviceType device) {
          const Plane to = empty_plane(rows, columns, device, q, along);
          requantize_into(to, {x.data.to(device), x.scales.to(device)}, q);
          return to;
        };
        expect_same(requantized(at::kCUDA), requantized(at::kCPU), "column");
      }
    }
  }
}

TEST_F(Float8Cuda, TransposeAndSwizzle) {
  for (const auto& [rows, columns] :
       {std::pair{1, 1},
        {16, 16},
        {128, 128},
        {77, 130},
        {130, 77},
        {512, 400},
        {400, 512},
        {1000, 48}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns));
    const at::Tensor x =
        at::randint(256, {rows, columns}, seeded(rows), at::kByte);
    expect_same_bytes(transpose_bytes(x.cuda()), transpose_bytes(x), "turned");
    const at::Tensor scales = x.view(at::kFloat8_e8m0fnu);
    expect_same_bytes(
        swizzle_mx_scales(scales.cuda()),
        swizzle_mx_scales(scales),
        "swizzled");
  }
}

}  // namespace
}  // namespace flatshard::float8
