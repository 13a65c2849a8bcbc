#include "flatshard/group/initializer.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>

#include <gtest/gtest.h>

#include <vector>

namespace flatshard {
namespace {

constexpr const char* kName = "layers.0.weight";

at::Tensor
filled(InitSpec spec, std::int64_t begin, std::int64_t n, int seed = 7) {
  at::Tensor out = at::full({n}, 99.0F);
  Initializer(seed).fill(out, kName, spec, begin);
  return out;
}

// Worked out apart from this code, in double precision.
TEST(Initializer, KnownNormalValues) {
  const std::vector<float> first{
      -0.2549214F,
      -0.1954712F,
      -1.5956087F,
      -0.4518955F,
      0.8472049F,
      -1.2692711F,
      0.1181039F,
      0.7080283F};
  const std::vector<float> from_100{
      1.0387443F,
      0.0652542F,
      0.7619821F,
      0.0369175F};
  const InitSpec standard = InitSpec::normal(0, 1);
  EXPECT_TRUE(at::allclose(filled(standard, 0, 8), at::tensor(first), 0, 1e-6));
  EXPECT_TRUE(
      at::allclose(filled(standard, 100, 4), at::tensor(from_100), 0, 1e-6));
  EXPECT_TRUE(at::allclose(
      filled(InitSpec::normal(3, 0.5F), 0, 8),
      at::tensor(first) * 0.5 + 3,
      0,
      1e-6));
}

TEST(Initializer, KnownUniformValues) {
  const std::vector<float> first{
      0.0502884F,
      0.6041129F,
      0.7471827F,
      0.5439243F};
  EXPECT_TRUE(at::allclose(
      filled(InitSpec::uniform(0, 1), 0, 4),
      at::tensor(first),
      0,
      1e-6));
  EXPECT_TRUE(at::allclose(
      filled(InitSpec::uniform(-2, 2), 0, 4),
      at::tensor(first) * 4 - 2,
      0,
      1e-6));
}

TEST(Initializer, ValuesDoNotDependOnTheCut) {
  for (const InitSpec spec :
       {InitSpec::normal(0.1F, 2), InitSpec::uniform(-1, 1)}) {
    const at::Tensor whole = filled(spec, 0, 500);
    for (const std::int64_t step : {1, 3, 4, 5, 16, 37, 499}) {
      for (std::int64_t at = 0; at < 500; at += step) {
        const std::int64_t n = std::min<std::int64_t>(step, 500 - at);
        ASSERT_TRUE(filled(spec, at, n).equal(whole.narrow(0, at, n)))
            << "cut of " << step << " at " << at;
      }
    }
  }
}

TEST(Initializer, LongRangesAreDrawnInParts) {
  constexpr std::int64_t kLong = (std::int64_t{1} << 24) + 5;
  const InitSpec spec = InitSpec::uniform(0, 1);
  const at::Tensor whole = filled(spec, 2, kLong);
  const std::int64_t tail = kLong - 20;
  EXPECT_TRUE(whole.narrow(0, tail, 20).equal(filled(spec, 2 + tail, 20)));
}

TEST(Initializer, NarrowDtypesAreRounded) {
  const InitSpec spec = InitSpec::normal(0, 1);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor out = at::empty({4, 25}, dtype);
    Initializer(7).fill(out, kName, spec, 10);
    EXPECT_TRUE(out.flatten().equal(filled(spec, 10, 100).to(dtype)));
  }
}

TEST(Initializer, MomentsAndIndependence) {
  constexpr std::int64_t kCount = 200000;
  const at::Tensor normal = filled(InitSpec::normal(0.5F, 2), 0, kCount);
  EXPECT_NEAR(normal.mean().item<double>(), 0.5, 5 * 2 / std::sqrt(kCount));
  EXPECT_NEAR(normal.std().item<double>(), 2.0, 5 * 2 / std::sqrt(2 * kCount));
  const at::Tensor uniform = filled(InitSpec::uniform(-1, 3), 0, kCount);
  EXPECT_NEAR(uniform.mean().item<double>(), 1.0, 5 * 1.2 / std::sqrt(kCount));
  EXPECT_NEAR(uniform.std().item<double>(), 4 / std::sqrt(12.0), 0.01);
  EXPECT_GE(uniform.min().item<double>(), -1.0);
  EXPECT_LT(uniform.max().item<double>(), 3.0);

  const InitSpec standard = InitSpec::normal(0, 1);
  const at::Tensor base = filled(standard, 0, kCount);
  at::Tensor other_name = at::empty({kCount});
  Initializer(7).fill(other_name, "layers.1.weight", standard, 0);
  const double noise = 5 / std::sqrt(kCount);
  EXPECT_NEAR((base * other_name).mean().item<double>(), 0, noise);
  const at::Tensor other_seed = filled(standard, 0, kCount, 8);
  EXPECT_NEAR((base * other_seed).mean().item<double>(), 0, noise);
  const at::Tensor next = filled(standard, 1, kCount);
  EXPECT_NEAR((base * next).mean().item<double>(), 0, noise);
}

TEST(Initializer, ConstantsAndEmptyTensors) {
  EXPECT_TRUE(filled(InitSpec::zeros(), 3, 5).equal(at::zeros({5})));
  EXPECT_TRUE(filled(InitSpec::ones(), 3, 5).equal(at::ones({5})));
  EXPECT_EQ(filled(InitSpec::normal(0, 1), 0, 0).numel(), 0);
}

TEST(Initializer, RefusesWhatItCannotFill) {
  const Initializer initializer(0);
  const InitSpec spec = InitSpec::normal(0, 1);
  EXPECT_THROW(
      initializer.fill(at::empty({4}, at::kLong), kName, spec, 0),
      Error);
  EXPECT_THROW(initializer.fill(at::empty({4, 4}).t(), kName, spec, 0), Error);
}

}  // namespace
}  // namespace flatshard
