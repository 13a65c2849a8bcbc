#include "flatshard/float8/quantize.h"

#include "check.h"
#include "flatshard/core/error.h"

#include <cmath>
#include <functional>
#include <limits>

// Planes against the definition, element by element with the scalar functions
// of formats.h.
namespace flatshard::float8 {
namespace {

using ::testing::TestWithParam;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Block {
  std::int64_t outer;
  std::int64_t inner;
};
// 0: all.
Block block_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::tensorwise:
      return {0, 0};
    case Recipe::rowwise:
      return {1, 0};
    case Recipe::blockwise:
      return {128, 128};
    case Recipe::blockwise_1x128:
      return {1, 128};
    default:
      return {1, 32};
  }
}

struct Oracle {
  at::Tensor data;    // uint8 [outer, inner]
  at::Tensor scales;  // float64 of each element [outer, inner]
};

// x [outer, inner] float32.
Oracle oracle(const at::Tensor& x, const Quantizer& q) {
  const Block block = block_of(q.recipe);
  const std::int64_t bo = block.outer == 0 ? x.size(0) : block.outer;
  const std::int64_t bi = block.inner == 0 ? x.size(1) : block.inner;
  Oracle out{
      at::empty(x.sizes(), at::kByte),
      at::empty(x.sizes(), at::kDouble)};
  const auto v = x.accessor<float, 2>();
  auto data = out.data.accessor<std::uint8_t, 2>();
  auto scales = out.scales.accessor<double, 2>();
  for (std::int64_t o = 0; o < x.size(0); o += bo) {
    for (std::int64_t i = 0; i < x.size(1); i += bi) {
      const auto each = [&](const auto& f) {
        for (std::int64_t r = o; r < std::min(o + bo, x.size(0)); ++r) {
          for (std::int64_t c = i; c < std::min(i + bi, x.size(1)); ++c) {
            f(r, c);
          }
        }
      };
      float amax = 0;
      each([&](int r, int c) {
        const float magnitude = std::abs(v[r][c]);
        amax = std::isnan(magnitude) || std::isnan(amax)
                   ? std::numeric_limits<float>::quiet_NaN()
                   : std::max(amax, magnitude);
      });
      const Scale scale =
          q.recipe == Recipe::rowwise || q.recipe == Recipe::mxfp8
              ? scale_of_e8m0(e8m0_of(amax, q.format, q.rounding))
              : float_scale_of(amax, q.format);
      each([&](int r, int c) {
        data[r][c] = encode(v[r][c] * scale.quantize, q.format);
        scales[r][c] = scale.dequantize;
      });
    }
  }
  return out;
}

// Returns the scale of each element of data [outer, inner].
at::Tensor spread(const at::Tensor& scales, Recipe recipe, at::IntArrayRef to) {
  at::Tensor s = scales.to(at::kDouble);
  if (recipe == Recipe::tensorwise) {
    return s.expand(to);
  }
  if (recipe == Recipe::rowwise) {
    return s.unsqueeze(1).expand(to);
  }
  const Block block = block_of(recipe);
  return s.repeat_interleave(block.outer, 0)
      .repeat_interleave(block.inner, 1)
      .narrow(0, 0, to[0])
      .narrow(1, 0, to[1]);
}

void expect_oracle(
    const Plane& plane,
    const at::Tensor& x,
    const Quantizer& q) {
  const Oracle want = oracle(x.to(at::kFloat).contiguous(), q);
  expect_same_bytes(plane.data.view(at::kByte), want.data, "data");
  expect_same_bytes(
      spread(plane.scales, q.recipe, x.sizes()),
      want.scales,
      "scales");
}

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

TEST(Quantize, EveryRecipeAxisAndDtypeEqualsTheDefinition) {
  for (const Quantizer& q : quantizers()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(describe(q) + " " + c10::toString(dtype));
      const at::Tensor x = any_values(128, 256, 3).to(dtype);
      expect_oracle(quantize(x, q), x, q);
      const Plane transposed = quantize(x, q, {.axis = Axis::column});
      expect_oracle(transposed, x.t(), q);
      const Plane lying =
          quantize(x, q, {.axis = Axis::column, .transpose = false});
      expect_oracle({lying.data.t(), lying.scales}, x.t(), q);
      const auto [row, column] = quantize_both(x, q);
      expect_same_bytes(column.data, transposed.data, "both: data");
      expect_same_bytes(column.scales, transposed.scales, "both: scales");
      expect_oracle(row, x, q);
    }
  }
}

TEST(Quantize, RowsThatAreNoMultipleAreFilledWithZeros) {
  for (const Recipe recipe :
       {Recipe::tensorwise,
        Recipe::rowwise,
        Recipe::blockwise_1x128,
        Recipe::mxfp8}) {
    SCOPED_TRACE(to_string(recipe));
    const at::Tensor x = any_values(77, 64, 4);
    const Plane plane =
        quantize(x, {recipe}, {.axis = Axis::column, .multiple = 16});
    ASSERT_EQ(plane.data.sizes(), (at::IntArrayRef{64, 80}));
    expect_oracle({plane.data.narrow(1, 0, 77), plane.scales}, x.t(), {recipe});
    EXPECT_EQ(
        bytes(plane.data.narrow(1, 77, 3)).count_nonzero().item<int>(),
        0);
  }
}

TEST(Quantize, ScalesLieAsCublasReadsThem) {
  const at::Tensor x = any_values(384, 256, 5);
  const auto strides = [&](Recipe recipe, PlaneOptions options = {}) {
    return quantize(x, {recipe}, options).scales.strides().vec();
  };
  using Strides = std::vector<std::int64_t>;
  EXPECT_EQ(strides(Recipe::tensorwise), Strides{});
  EXPECT_EQ(strides(Recipe::rowwise), Strides{1});
  EXPECT_EQ(strides(Recipe::blockwise), (Strides{4, 1}));
  EXPECT_EQ(
      strides(Recipe::blockwise, {.axis = Axis::column}),
      (Strides{4, 1}));
  EXPECT_EQ(strides(Recipe::blockwise_1x128), (Strides{1, 384}));
  EXPECT_EQ(
      strides(Recipe::blockwise_1x128, {.axis = Axis::column}),
      (Strides{1, 256}));
  EXPECT_EQ(strides(Recipe::mxfp8), (Strides{8, 1}));
  EXPECT_EQ(strides(Recipe::mxfp8, {.axis = Axis::column}), (Strides{12, 1}));
  EXPECT_EQ(
      strides(Recipe::mxfp8, {.axis = Axis::column, .transpose = false}),
      (Strides{1, 256}));
  const Plane odd = quantize(any_values(77, 128, 5), {Recipe::blockwise_1x128});
  EXPECT_EQ(odd.scales.strides().vec(), (Strides{1, 80}));
}

TEST(Quantize, GivenAmaxAndScales) {
  const at::Tensor x = any_values(64, 128, 6);
  const at::Tensor amax = at::full({}, 3.0e7F);
  const Plane plane = quantize(x, {}, {.amax = amax});
  const Scale scale = float_scale_of(3.0e7F, Format::e4m3);
  EXPECT_EQ(plane.scales.item<float>(), scale.dequantize);
  EXPECT_EQ(
      bytes(plane.data)[0][1].item<int>(),
      encode(12345.0F * scale.quantize, Format::e4m3));
  // A rank of two stores the same as one rank.
  const Plane whole = quantize(x, {}, {.axis = Axis::column});
  const at::Tensor both =
      at::maximum(amax_of(x.narrow(0, 0, 32)), amax_of(x.narrow(0, 32, 32)));
  const Plane half =
      quantize(x.narrow(0, 0, 32), {}, {.axis = Axis::column, .amax = both});
  expect_same_bytes(half.scales, whole.scales, "scales");
  expect_same_bytes(half.data, whole.data.narrow(1, 0, 32), "half");
  const Plane rows = quantize(
      x.narrow(1, 0, 64),
      {Recipe::rowwise},
      {.amax = std::get<0>(x.abs().max(1))});
  expect_same_bytes(
      rows.data,
      quantize(x, {Recipe::rowwise}).data.narrow(1, 0, 64),
      "rowwise");
  // Scales of blocks that other ranks store too.
  const at::Tensor given =
      at::full({64, 4}, 130, at::kByte).view(at::kFloat8_e8m0fnu);
  const Plane mx = quantize(x, {Recipe::mxfp8}, {.scales = given});
  EXPECT_EQ(bytes(mx.data)[0][1].item<int>(), 0x7e);
  EXPECT_EQ(
      bytes(mx.data)[5][7].item<int>(),
      encode(x[5][7].item<float>() / 8, Format::e4m3));
}

TEST(Quantize, IntoMemoryThatIsThere) {
  const at::Tensor x = any_values(128, 256, 6);
  for (const Recipe recipe : kRecipes) {
    SCOPED_TRACE(to_string(recipe));
    for (const Axis axis : {Axis::row, Axis::column}) {
      const PlaneOptions options{.axis = axis};
      const Plane want = quantize(x, {recipe}, options);
      const Plane out = empty_plane(128, 256, at::kCPU, {recipe}, options);
      quantize_into(
          {out.data.view(at::kByte), out.scales},
          x,
          {recipe},
          options);
      expect_same_bytes(out.data, want.data, "data");
      expect_same_bytes(out.scales, want.scales, "scales");
    }
  }
}

TEST(Quantize, InfAndNanSpoilTheirBlockOnly) {
  for (const float bad : {kInf, -kInf, std::nanf("")}) {
    for (const Recipe recipe : kRecipes) {
      SCOPED_TRACE(to_string(recipe));
      at::Tensor x = at::ones({256, 256});
      x[130][40] = bad;
      const at::Tensor back = dequantize(quantize(x, {recipe}), recipe);
      const Block block = block_of(recipe);
      const std::int64_t outer = block.outer == 0 ? 256 : block.outer;
      const std::int64_t inner = block.inner == 0 ? 256 : block.inner;
      EXPECT_EQ(back.isnan().sum().item<std::int64_t>(), outer * inner);
      EXPECT_TRUE(std::isnan(back[130][40].item<float>()));
    }
  }
  EXPECT_EQ(amax_of(at::tensor({1.0F, -kInf})).item<float>(), kInf);
  EXPECT_TRUE(std::isnan(amax_of(at::tensor({NAN, kInf})).item<float>()));
  EXPECT_EQ(amax_of(at::empty({0})).item<float>(), 0.0F);
}

TEST(Quantize, F12_ZerosHaveAScale) {
  const at::Tensor x = at::zeros({128, 128});
  for (const Recipe recipe : kRecipes) {
    SCOPED_TRACE(to_string(recipe));
    const Plane plane = quantize(x, {recipe});
    EXPECT_TRUE(plane.scales.to(at::kFloat).isfinite().all().item<bool>());
    EXPECT_EQ(bytes(plane.data).count_nonzero().item<int>(), 0);
    EXPECT_TRUE(at::equal(dequantize(plane, recipe), x));
  }
}

TEST(Quantize, F13_NothingSaturatesWhenScalesRoundUp) {
  const at::Tensor x = at::randn({256, 256}, seeded(5));
  for (const Recipe recipe : {Recipe::rowwise, Recipe::mxfp8}) {
    SCOPED_TRACE(to_string(recipe));
    const auto saturated = [&](Rounding rounding) {
      const Quantizer q{.recipe = recipe, .rounding = rounding};
      const Plane plane = quantize(x, q);
      const at::Tensor scales = spread(plane.scales, recipe, x.sizes());
      return (x.abs() > 448 * scales).sum().item<std::int64_t>();
    };
    EXPECT_EQ(saturated(Rounding::up), 0);
    EXPECT_GT(saturated(Rounding::floor), 0);
  }
}

TEST(Quantize, F14_EmptyTensors) {
  for (const Recipe recipe : kRecipes) {
    for (const std::int64_t rows : {0, 128}) {
      for (const Axis axis : {Axis::row, Axis::column}) {
        const Plane plane =
            quantize(at::empty({rows, 128 - rows}), {recipe}, {.axis = axis});
        EXPECT_EQ(plane.data.numel(), 0);
        EXPECT_EQ(dequantize(plane, recipe).numel(), 0);
      }
    }
  }
}

double snr(const at::Tensor& x, const at::Tensor& back) {
  const double signal = x.to(at::kDouble).square().sum().item<double>();
  const double noise = (x - back).to(at::kDouble).square().sum().item<double>();
  return 10 * std::log10(signal / noise);
}

// On Gaussian weights; OCP's rounding saturates some.
TEST(Quantize, SignalToNoise) {
  at::Generator generator = seeded(7);
  const at::Tensor x = at::randn({512, 512}, generator).mul_(0.02);
  for (const Quantizer& q : quantizers()) {
    if (q.format == Format::e5m2) {
      continue;
    }
    SCOPED_TRACE(describe(q));
    for (const Axis axis : {Axis::row, Axis::column}) {
      const at::Tensor back =
          dequantize(quantize(x, q, {.axis = axis}), q.recipe, {.axis = axis});
      const double db = snr(axis == Axis::row ? x : x.t(), back);
      EXPECT_GE(db, q.rounding == Rounding::up ? 31.0 : 29.5);
      EXPECT_LE(db, 33.5);
    }
  }
}

TEST(Dequantize, EveryRecipeAxisAndDtype) {
  for (const Recipe recipe : kRecipes) {
    SCOPED_TRACE(to_string(recipe));
    const at::Tensor x = any_values(128, 256, 8);
    for (const bool transpose : {true, false}) {
      for (const Axis axis : {Axis::row, Axis::column}) {
        const Plane plane =
            quantize(x, {recipe}, {.axis = axis, .transpose = transpose});
        const bool turned = axis == Axis::column && transpose;
        const Oracle want =
            oracle(axis == Axis::row ? x : x.t().contiguous(), {recipe});
        at::Tensor exact =
            want.data.view(at::kFloat8_e4m3fn).to(at::kDouble) * want.scales;
        exact = axis == Axis::column && !turned ? exact.t() : exact;
        const at::Tensor back =
            dequantize(plane, recipe, {.axis = axis, .transpose = transpose});
        EXPECT_TRUE(at::equal(back, exact.to(at::kFloat)));
        EXPECT_TRUE(at::equal(
            dequantize(
                plane,
                recipe,
                {.axis = axis, .transpose = transpose, .dtype = at::kBFloat16}),
            back.to(at::kBFloat16)));
      }
    }
  }
}

TEST(SwizzleMxScales, TilesOf128By4) {
  const at::Tensor scales = at::randint(256, {200, 6}, seeded(9), at::kByte)
                                .view(at::kFloat8_e8m0fnu);
  const at::Tensor got = bytes(swizzle_mx_scales(scales));
  ASSERT_EQ(got.numel(), 2 * 2 * 512);
  at::Tensor want = at::zeros({2 * 2 * 512}, at::kByte);
  const at::Tensor from = bytes(scales);
  for (int r = 0; r < 200; ++r) {
    for (int c = 0; c < 6; ++c) {
      const int tile = (r / 128 * 2 + c / 4) * 512;
      want[tile + r % 32 * 16 + r % 128 / 32 * 4 + c % 4] = from[r][c];
    }
  }
  EXPECT_TRUE(at::equal(got, want));
}

TEST(TransposeBytes, OfEachDtype) {
  const at::Tensor x = quantize(any_values(48, 80, 10), {}).data;
  const at::Tensor t = transpose_bytes(x);
  EXPECT_EQ(t.scalar_type(), at::kFloat8_e4m3fn);
  expect_same_bytes(t, x.t(), "transpose");
}

// --------------------------------------------------------------- bad input

std::string problem_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    return error.message();
  }
  return "no error";
}

void expect_problem(
    const std::function<void()>& call,
    const std::string& text) {
  const std::string problem = problem_of(call);
  EXPECT_NE(problem.find(text), std::string::npos) << problem;
}

TEST(BadInput, IsNamed) {
  const at::Tensor x = at::ones({128, 128});
  const auto on = [&](at::Tensor t, Quantizer q, PlaneOptions options = {}) {
    return [=] { quantize(t, q, options); };
  };
  expect_problem(
      on(x.to(at::kDouble), {}),
      "float32 or bfloat16 tensor, got Double");
  expect_problem(on(x.to(at::kHalf), {}), "got Half");
  expect_problem(on(x[0], {}), "[rows, columns], got [128]");
  expect_problem(
      on(at::ones({128, 100}), {Recipe::mxfp8}),
      "mxfp8: expected columns divisible by 32, got 100");
  expect_problem(
      on(at::ones({100, 128}), {Recipe::mxfp8}, {.axis = Axis::column}),
      "mxfp8: expected rows divisible by 32, got 100");
  expect_problem(
      on(at::ones({64, 128}), {Recipe::blockwise}),
      "blockwise: expected rows divisible by 128, got 64");
  expect_problem(
      on(at::ones({64, 96}), {Recipe::blockwise_1x128}),
      "blockwise_1x128: expected columns divisible by 128, got 96");
  expect_problem(
      on(x, {.recipe = Recipe::blockwise, .rounding = Rounding::floor}),
      "rounding = 'floor' does not fit blockwise, because its scales are "
      "448.0 / amax");
  expect_problem(
      [&] { quantize_into(quantize(x, {}), x, {Recipe::rowwise}); },
      "out: expected data [128, 128] with strides [128, 1] and scales [128]");
  expect_problem(on(x, {}, {.multiple = 16}), "multiple: expected 1");
  expect_problem(
      on(x, {Recipe::mxfp8}, {.amax = at::ones({})}),
      "amax cannot be given for recipe mxfp8");
  expect_problem(
      on(x, {}, {.amax = at::ones({2})}),
      "amax: expected Float [] ");
  expect_problem(
      on(x, {}, {.scales = at::ones({})}),
      "scales: expected none for recipe tensorwise; give amax");
  expect_problem(
      [] { recipe_of("rowise"); },
      "got 'rowise'; did you mean 'rowwise'?");
  expect_problem([] { rounding_of("nearest"); }, "expected one of floor, up");
  const Plane plane = quantize(x, {Recipe::mxfp8});
  expect_problem(
      [&] { dequantize(plane, Recipe::rowwise); },
      "scales: expected rowwise for data [128, 128]");
  expect_problem(
      [&] {
        dequantize({x, plane.scales}, Recipe::mxfp8);
      },
      "data: expected");
  expect_problem(
      [&] { dequantize(plane, Recipe::mxfp8, {.dtype = at::kDouble}); },
      "dtype: expected float32 or bfloat16, got Double");
  expect_problem([&] { amax_of(x.to(at::kDouble)); }, "got Double");
  expect_problem([&] { transpose_bytes(x); }, "of one byte each");
  expect_problem([&] { swizzle_mx_scales(x); }, "float8_e8m0fnu");
}

}  // namespace
}  // namespace flatshard::float8
