// FP8 that AdamW makes of the new main weights in its pass.
#include "tests/optim/float8_update.h"

#include "flatshard/core/error.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/sgd.h"
#include "tests/group/float8_groups.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <mutex>

namespace flatshard::testing {
namespace {

at::Tensor random(std::int64_t n, std::uint64_t seed) {
  return at::randn({n}, at::detail::createCPUGenerator(seed));
}

FlatUpdate update_of(const at::Tensor& main, PlaneWriter planes) {
  const std::int64_t n = main.numel();
  return {
      .main = main,
      .grad = random(n, 2),
      .state0 = at::zeros({n}),
      .state1 = at::zeros({n}),
      .rows = {kSomeStep.row()},
      .planes = std::move(planes)};
}

// Returns the amax of each block separately, in float64.
at::Tensor
amax_of(const Float8UpdateCase& c, const at::Tensor& main, at::Tensor amax) {
  for (const float8::FlatRun& run : c.runs) {
    for (std::int64_t i = run.begin; i < run.end; ++i) {
      const std::int64_t at = run.first + i - run.begin;
      const std::int64_t to =
          run.block_rows == 0
              ? run.amax
              : run.amax + at / run.columns / run.block_rows * run.amax_stride +
                    at % run.columns / run.block_columns;
      amax[to] =
          std::max(amax[to].item<float>(), std::abs(main[i].item<float>()));
    }
  }
  return amax;
}

TEST(AdamWFloat8, AmaxIsThatOfTheNewWeights) {
  for (const Float8UpdateCase& c : float8_update_cases()) {
    if (c.num_amax == 0 || c.numel > 20000) {
      continue;
    }
    SCOPED_TRACE(c.name);
    const at::Tensor main = random(c.numel, 1);
    const at::Tensor before = main.clone();
    FlatUpdate update = update_of(main, c.outputs(at::kCPU));
    update.planes.amax[0] = 100.0F;
    at::Tensor first = at::zeros_like(update.planes.amax);
    first[0] = 100.0F;
    flat_update(Algorithm::adamw, update);
    EXPECT_FALSE(main.equal(before));
    EXPECT_TRUE(update.planes.amax.equal(amax_of(c, main, first)));
  }
}

TEST(AdamWFloat8, Mxfp8IsThatOfTheNewWeights) {
  for (const Float8UpdateCase& c : float8_update_cases()) {
    if (c.num_amax > 0) {
      continue;
    }
    SCOPED_TRACE(c.name);
    const at::Tensor main = random(c.numel, 1);
    const FlatUpdate update = update_of(main, c.outputs(at::kCPU));
    flat_update(Algorithm::adamw, update);
    for (const float8::FlatRun& run : c.runs) {
      const std::int64_t n = run.end - run.begin;
      const float8::Plane want = float8::quantize(
          main.narrow(0, run.begin, n).view({-1, 32}),
          {float8::Recipe::mxfp8});
      EXPECT_TRUE(update.planes.data.narrow(0, run.data, n)
                      .equal(want.data.view(at::kByte).flatten()));
      EXPECT_TRUE(update.planes.scales.narrow(0, run.scales, n / 32)
                      .equal(want.scales.view(at::kByte).flatten()));
    }
    // Nothing before the first run.
    EXPECT_FALSE(update.planes.data.narrow(0, 0, 16).any().item<bool>());
  }
}

TEST(AdamWFloat8, NanIsTheLargest) {
  const at::Tensor main = random(64, 1);
  main[50] = NAN;
  const FlatUpdate update = update_of(
      main,
      {.runs =
           {{.begin = 0, .end = 32, .columns = 32, .amax = 0},
            {.begin = 32, .end = 64, .columns = 32, .amax = 1}},
       .amax = at::zeros({2})});
  flat_update(Algorithm::adamw, update);
  EXPECT_FALSE(std::isnan(update.planes.amax[0].item<float>()));
  EXPECT_TRUE(std::isnan(update.planes.amax[1].item<float>()));
}

TEST(AdamWFloat8, RunsThatDoNotFitAreRefused) {
  const auto refused = [](std::vector<float8::FlatRun> runs) {
    const FlatUpdate update =
        update_of(random(64, 1), {.runs = runs, .amax = at::zeros({2})});
    EXPECT_THROW(flat_update(Algorithm::adamw, update), Error);
  };
  refused({{.begin = 0, .end = 80, .columns = 16}});
  refused({{.begin = 0, .end = 24, .columns = 16}});
  refused(
      {{.begin = 32, .end = 64, .columns = 32},
       {.begin = 0, .end = 32, .columns = 32}});
}

// Returns the bytes of both planes after two steps.
Bytes after_two_steps(Optimizer& optimizer, ParamGroup& group) {
  for (int step = 0; step < 2; ++step) {
    const FlatLayout& layout = group.layout();
    const at::Tensor flat = at::zeros({layout.numel()});
    for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
      flat.narrow(0, layout.tensor_offset(i), layout.tensor_numel(i))
          .copy_(random(layout.tensor_numel(i), 10 + step));
    }
    group.gradients().reduce(
        flat.to(group.options().precision.reduce),
        group.plan_reduction(true, true));
    optimizer.step(0.1);
    optimizer.zero_grad();
    if (step == 0) {
      gathered(group);
    }
  }
  return gathered(group);
}

// Planes written during the update equal the planes that an all-gather
// quantizes from the same main weights.
TEST(AdamWFloat8, PlanesOfAnUpdateAreThoseOfAForeignWrite) {
  const std::vector<GroupCase> cases{
      {"zero3", {1}},
      {"zero3", {2}},
      {"zero3", {3}},
      {"zero1", {2}},
      {"zero2", {3}},
      {"hfsdp", {2, 2}}};
  std::mutex mutex;
  for (const GroupCase& c : cases) {
    run_ranks(c.world(), [&](RankContext& context) {
      context.axes = c.axes();
      const auto mesh = context.mesh();
      for (const Float8Format& format : formats()) {
        const auto group = fp8_group(c, mesh, format);
        AdamW adamw({group.get()}, {});
        const Bytes begun = after_two_steps(adamw, *group);
        group->weights().main().local().mul_(1);  // still a write
        ASSERT_TRUE(group->weights().adopt_foreign_writes());
        const Bytes anew = gathered(*group);
        std::ostringstream what;
        what << name_of(format) << " " << c;
        const std::lock_guard lock(mutex);
        expect_same(begun, anew, what.str());
      }
    });
  }
}

TEST(AdamWFloat8, AnUpdateBeginsPlanesWhereItCan) {
  const auto begins = [](const Float8Format& format, bool adamw) {
    const auto group =
        fp8_group({"zero3", {1}}, Mesh::single(at::kCPU), format);
    std::unique_ptr<Optimizer> optimizer;
    if (adamw) {
      optimizer = std::make_unique<AdamW>(
          std::vector<ParamGroup*>{group.get()},
          AdamWOptions{});
    } else {
      optimizer = std::make_unique<Sgd>(
          std::vector<ParamGroup*>{group.get()},
          SgdOptions{});
    }
    gathered(*group);
    group->gradients().reduce(
        at::ones({group->layout().numel()}, group->options().precision.reduce),
        group->plan_reduction(true, true));
    optimizer->step(0.1);
    const auto plan = group->weights().plan_gather();
    EXPECT_TRUE(plan.refresh);
    return plan.encoded != nullptr;
  };
  for (const Float8Format& format : formats()) {
    EXPECT_FALSE(begins(format, /*adamw=*/false)) << name_of(format);
    const bool needs_all_rows =
        format.recipe == float8::Recipe::rowwise && format.stored_columns;
    EXPECT_EQ(begins(format, /*adamw=*/true), !needs_all_rows)
        << name_of(format);
  }
}

// Scales count the weights that are not updated, too.
TEST(AdamWFloat8, AnUpdateOfSomeParametersBeginsNoPlanes) {
  for (const Float8Format& format : formats()) {
    const auto group =
        fp8_group({"zero3", {1}}, Mesh::single(at::kCPU), format);
    ParameterGroups parameters{.groups = {{.title = "updated"}}};
    auto& of_group = parameters.of_parameters.emplace_back(
        group->parameters().size(),
        std::size_t{0});
    of_group.front() = ParameterGroups::kNotUpdated;
    Optimizer optimizer({group.get()}, std::move(parameters));
    gathered(*group);
    group->gradients().reduce(
        at::ones({group->layout().numel()}, group->options().precision.reduce),
        group->plan_reduction(true, true));
    optimizer.step(0.1);
    EXPECT_EQ(group->weights().plan_gather().encoded, nullptr)
        << name_of(format);
  }
}

// A write after the update makes them again.
TEST(AdamWFloat8, F9_AForeignWriteBehindAnUpdateCounts) {
  for (const Float8Format& format : formats()) {
    const auto group =
        fp8_group({"zero3", {1}}, Mesh::single(at::kCPU), format);
    AdamW adamw({group.get()}, {});
    const Bytes first = after_two_steps(adamw, *group);
    group->weights().main().local().mul_(3);
    ASSERT_TRUE(group->weights().adopt_foreign_writes());
    EXPECT_EQ(group->weights().plan_gather().encoded, nullptr);
    group->weights().progress().mark_stale();
    const Bytes second = gathered(*group);
    EXPECT_FALSE(
        second.at("wide.rows.scales").equal(first.at("wide.rows.scales")))
        << name_of(format);
  }
}

}  // namespace
}  // namespace flatshard::testing
