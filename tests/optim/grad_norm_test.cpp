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

// The gradient of rank r is (r + 1) times this: it is exact in bf16.
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

// Tensor parallelism splits one weight by rows and one by columns, and all
// ranks share one. Each rank of tp computed a part of its gradient.
TEST(GradNorm, G1_EveryElementCountsOnceOnEveryGrid) {
  const at::Tensor cut = at::arange(1, 25).view({4, 6}).to(at::kFloat);
  const at::Tensor shared = at::full({7}, 4, at::kFloat);
  const double want = std::sqrt(
      2 * cut.square().sum().item<double>() +
      shared.square().sum().item<double>());
  struct GridCase {
    std::int64_t dp = 1;
    std::int64_t tp = 1;
    std::string strategy = "zero3";
  };
  for (const GridCase& c :
       {GridCase{},
        GridCase{2, 1},
        GridCase{1, 2},
        GridCase{2, 2},
        GridCase{2, 2, "zero0"},
        GridCase{2, 2, "zero1"},
        GridCase{3, 2, "zero2"},
        GridCase{1, 4},
        GridCase{2, 4}}) {
    run_ranks(static_cast<int>(c.dp * c.tp), [&](RankContext& context) {
      const auto mesh = context.mesh({{"dp", c.dp}, {"tp", c.tp}});
      const std::int64_t t = mesh->coordinate("tp");
      std::vector<std::unique_ptr<ParamGroup>> groups;
      std::vector<ParamGroup*> all;
      const auto add = [&](std::string name,
                           const at::Tensor& gradient,
                           ParameterPlacement placement,
                           double divisor) {
        const auto own = placement.mesh ? placement.mesh : mesh;
        groups.push_back(std::make_unique<ParamGroup>(
            GroupSpec{
                .name = name,
                .parameters =
                    {{.names = {name},
                      .shape = gradient.sizes().vec(),
                      .placement = std::move(placement),
                      .init = InitSpec::zeros()}},
                .mesh = own,
                .strategy = Strategy::named(c.strategy, own->num_axes()),
                .model_mesh = mesh},
            ParamGroupOptions{
                .precision = Precision::full(),
                .grad_divisor = divisor},
            Initializer(5)));
        ParamGroup& group = *groups.back();
        all.push_back(&group);
        const at::Tensor flat = at::zeros({group.layout().numel()});
        flat.narrow(0, group.layout().tensor_offset(0), gradient.numel())
            .copy_(gradient.flatten());
        reduce(group, flat);
      };
      for (const std::int64_t dim : {0, 1}) {
        if (cut.size(dim) % c.tp == 0) {
          const std::int64_t n = cut.size(dim) / c.tp;
          add(fmt::format("cut {}", dim),
              cut.narrow(dim, t * n, n),
              ParameterPlacement::cut_over(
                  *mesh,
                  {"tp"},
                  TensorSlice().cut(dim, t, c.tp)),
              1);
          continue;
        }
        const std::int64_t begin = cut.size(dim) * t / c.tp;
        const std::int64_t end = cut.size(dim) * (t + 1) / c.tp;
        add(fmt::format("uneven {}", dim),
            cut.narrow(dim, begin, end - begin),
            ParameterPlacement::cut_over(
                *mesh,
                {"tp"},
                TensorSlice().take(dim, cut.size(dim), {{begin, end}})),
            1);
      }
      // The sum over tp and the mean over dp.
      add("shared",
          shared / static_cast<double>(c.tp),
          {},
          1 / static_cast<double>(c.tp));
      const GradNorm clip = grad_norm_and_scale(all, 1);
      EXPECT_NEAR(clip.norm.item<double>(), want, want * 1e-6)
          << c.strategy << " dp " << c.dp << " tp " << c.tp;
      if (c.strategy == "zero3") {
        // A weight that is not split over tp is sharded over dp and tp.
        EXPECT_EQ(all.back()->layout().num_shards(), c.dp * c.tp);
        EXPECT_EQ(all.front()->layout().num_shards(), c.dp);
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

// Each digit of float32 counts, however many values there are and wherever they
// are stored: on CPUs ranks are clipped by the bits of one.
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

TEST(GradNorm, ANanOfAnyRankIsTheNormOfAll) {
  for (const char* strategy : {"zero0", "zero3"}) {
    for (const int world : {2, 3}) {
      for (int bad = 0; bad < world; ++bad) {
        run_ranks(world, [&](RankContext& context) {
          const auto group = make_group(context.mesh(), strategy);
          at::Tensor gradient = base(*group);
          if (context.rank == bad) {
            // In another rank's shard.
            gradient[group->layout().tensor_offset(0) + (bad == 0 ? 39 : 0)] =
                std::nan("");
          }
          reduce(*group, gradient);
          const GradNorm clip = grad_norm_and_scale({group.get()}, 1);
          EXPECT_TRUE(clip.norm.isnan().item<bool>());
          EXPECT_TRUE(clip.scale.isnan().item<bool>());
        });
      }
    }
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
