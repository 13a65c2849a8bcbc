#include "flatshard/optim/grad_norm.h"

#include "flatshard/core/error.h"
#include "tests/optim/one_group.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace flatshard::testing {
namespace {

struct ClipCase {
  std::string strategy;
  std::vector<MeshAxis> axes;
};

// The gradient of rank r is (r + 1) times this: bf16 holds it exactly.
at::Tensor base(const ParamGroup& group) {
  return whole_gradient(group, at::full({40}, 2), at::full({25}, -1));
}

double norm_of_base() {
  return std::sqrt(40 * 4.0 + 25);
}

TEST(GradNorm, B22_EveryElementCountsOnceWhateverIsReplicated) {
  const std::vector<ClipCase> cases{
      {"zero0", {{"dp", 1}}},
      {"zero0", {{"dp", 2}}},
      {"zero1", {{"dp", 2}}},
      {"zero3", {{"dp", 4}}},
      {"hsdp", {{"outer", 2}, {"dp", 2}}},
      {"hfsdp", {{"outer", 2}, {"dp", 2}}},
      {"hsdp_zero1", {{"outer", 2}, {"dp", 2}}}};
  for (const ClipCase& c : cases) {
    int world = 1;
    for (const MeshAxis& axis : c.axes) {
      world *= static_cast<int>(axis.size);
    }
    run_ranks(world, [&](RankContext& context) {
      const auto group = make_group(context.mesh(c.axes), c.strategy);
      reduce(*group, base(*group) * (context.rank + 1));
      const double norm = norm_of_base() * (world + 1) / 2;  // the mean
      for (const double max_norm : {0.5, 1e6}) {
        const GradNorm clip = grad_norm_and_scale({group.get()}, max_norm);
        EXPECT_NEAR(clip.norm.item<double>(), norm, norm * 1e-6) << c.strategy;
        EXPECT_NEAR(
            clip.scale.item<double>(),
            std::min(1.0, max_norm / (norm + 1e-6)),
            1e-6);
      }
    });
  }
}

TEST(GradNorm, GroupsOfDifferentStrategiesAddUp) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto replicated = make_group(mesh, "zero0");
    const auto sharded = make_group(mesh, "zero3");
    const auto idle = make_group(mesh, "zero2");
    const auto frozen = make_group(mesh, "zero3", {}, false);
    reduce(*replicated, base(*replicated));
    reduce(*sharded, base(*sharded));
    const GradNorm clip = grad_norm_and_scale(
        {replicated.get(), sharded.get(), idle.get(), frozen.get()},
        1);
    const double norm = norm_of_base() * std::sqrt(2.0);
    EXPECT_NEAR(clip.norm.item<double>(), norm, 1e-5);
  });
}

// Each digit of float32, however many values there are and wherever they lie:
// on CPUs ranks are clipped by the bits of one.
TEST(GradNorm, M13_MillionsOfValuesLoseNoDigits) {
  constexpr std::int64_t kNumel = 6'000'001;
  const at::Tensor values = at::empty({kNumel}).normal_(
      0,
      1e-3,
      at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{7}));
  const double want = values.to(at::kDouble).norm().item<double>();
  for (const int world : {1, 2}) {
    run_ranks(world, [&](RankContext& context) {
      ParamGroup group(
          GroupSpec{
              .name = "block",
              .parameters =
                  {{.names = {"weight"},
                    .shape = {kNumel},
                    .init = InitSpec::zeros()}},
              .mesh = context.mesh(),
              .strategy = Strategy::named("zero3", 1)},
          ParamGroupOptions{.precision = Precision::full()},
          Initializer(5));
      const at::Tensor flat = at::zeros({group.layout().numel()});
      flat.narrow(0, group.layout().tensor_offset(0), kNumel).copy_(values);
      reduce(group, flat);
      const GradNorm clip = grad_norm_and_scale({&group}, 1);
      EXPECT_EQ(clip.norm.item<float>(), static_cast<float>(want)) << world;
    });
  }
}

TEST(GradNorm, WithoutALimitOnlyTheNorm) {
  const auto group = make_group(Mesh::single(at::kCPU));
  EXPECT_EQ(grad_norm_and_scale({group.get()}, 0).norm.item<double>(), 0);
  reduce(*group, base(*group));
  const GradNorm clip = grad_norm_and_scale({group.get()}, 0);
  EXPECT_NEAR(clip.norm.item<double>(), norm_of_base(), 1e-5);
  EXPECT_FALSE(clip.scale.defined());
}

TEST(GradNorm, RefusesGroupsOfSeveralMeshes) {
  const auto a = make_group(Mesh::single(at::kCPU));
  const auto b = make_group(Mesh::single(at::kCPU, "other"));
  EXPECT_THROW((void)grad_norm_and_scale({}, 1), Error);
  try {
    (void)grad_norm_and_scale({a.get(), b.get()}, 1);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    EXPECT_THAT(error.message(), ::testing::HasSubstr("{other: 1}"));
  }
}

}  // namespace
}  // namespace flatshard::testing
