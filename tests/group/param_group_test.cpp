#include "flatshard/group/param_group.h"

#include "flatshard/core/error.h"
#include "tests/group/groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <tuple>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

constexpr Precision kMixed{
    .compute = at::kBFloat16,
    .reduce = at::kFloat,
    .main_params = at::kFloat,
    .main_grads = at::kFloat};

class ParamGroups : public ::testing::TestWithParam<GroupCase> {};

TEST_P(ParamGroups, PlacementsAndBytes) {
  const GroupCase& c = GetParam();
  run_ranks(c.world(), [&](RankContext& context) {
    const auto group = make_group(c, context.mesh(c.axes()), kMixed);
    const Strategy& s = group->strategy();
    const std::int64_t n = group->layout().numel();
    EXPECT_EQ(group->weights().main().placements(), s.optimizer);
    EXPECT_EQ(group->weights().compute().placements(), s.parameter);
    EXPECT_EQ(group->layout().num_shards(), c.parts(s.optimizer));
    EXPECT_EQ(group->replicas().count, c.world() / c.parts(s.optimizer));
    EXPECT_EQ(group->weights().resident(), c.parts(s.parameter) == 1);
    EXPECT_EQ(
        group->weights().has_refresh(),
        c.parts(s.parameter) != group->layout().num_shards());
    const WeightPlanes::Bytes weights = group->weights().nbytes();
    EXPECT_EQ(weights.main, n / c.parts(s.optimizer) * 4);
    EXPECT_EQ(weights.compute, n / c.parts(s.parameter) * 2);
    GradientPipeline::Bytes bytes = group->gradients().nbytes();
    EXPECT_EQ(bytes.reduced + bytes.inner + bytes.local, 0);

    const at::Tensor slot = at::zeros({n});
    group->gradients().reduce(slot, group->plan_reduction(false, false));
    EXPECT_EQ(group->gradients().nbytes().local, n * 4);
    EXPECT_EQ(
        group->gradients().nbytes().reduced + group->gradients().nbytes().inner,
        0);
    EXPECT_TRUE(group->gradients().has_unreduced());
    const auto plan = group->plan_reduction(true, false);
    group->gradients().reduce(slot, plan);
    bool partial = false;
    for (const Placement& p : s.gradient) {
      partial = partial || p.is_partial();
    }
    EXPECT_EQ(plan.path == GradientPipeline::Path::inner, partial);
    EXPECT_EQ(
        group->gradients().nbytes().inner,
        partial ? n / c.parts(s.gradient) * 4 : 0);
    group->gradients().reduce(slot, group->plan_reduction(true, true));
    EXPECT_EQ(
        group->gradients().nbytes().reduced,
        n / c.parts(s.optimizer) * 4);
    EXPECT_EQ(group->gradients().reduced().buffer().placements(), s.optimizer);
    EXPECT_EQ(group->gradients().reduced().buffer().dtype(), at::kFloat);
    EXPECT_FALSE(group->gradients().has_unreduced());
    EXPECT_TRUE(group->gradients().reduced().exists());

    group->gradients().zero();
    EXPECT_FALSE(group->gradients().reduced().exists());
    bytes = group->gradients().nbytes();
    EXPECT_EQ(bytes.reduced + bytes.inner + bytes.local, 0);
  });
}

TEST_P(ParamGroups, R18_BytesAreThoseOfTheStorages) {
  const GroupCase& c = GetParam();
  for (const Granularity matrix :
       {Granularity::element(), Granularity::row(), Granularity::tensor()}) {
    run_ranks(c.world(), [&](RankContext& context) {
      const auto group = make_group(
          c,
          context.mesh(c.axes()),
          kMixed,
          GradScaling::mean,
          1,
          matrix);
      std::map<const void*, std::int64_t> storages;
      for (const at::Tensor& tensor :
           {group->weights().main().local(),
            group->weights().compute().local(),
            group->weights().compute_shard()}) {
        storages[tensor.storage().unsafeGetStorageImpl()] =
            static_cast<std::int64_t>(tensor.storage().nbytes());
      }
      std::int64_t sum = 0;
      for (const auto& [storage, nbytes] : storages) {
        sum += nbytes;
      }
      const WeightPlanes::Bytes bytes = group->weights().nbytes();
      EXPECT_EQ(bytes.main + bytes.compute, sum) << matrix.to_string();
    });
  }
}

TEST_P(ParamGroups, OneDtypeSharesMemory) {
  const GroupCase& c = GetParam();
  run_ranks(c.world(), [&](RankContext& context) {
    const auto group = make_group(c, context.mesh(c.axes()), Precision::full());
    EXPECT_EQ(group->weights().nbytes().main, 0);
    EXPECT_FALSE(group->weights().compute_shard().defined());
    EXPECT_EQ(
        group->weights().main().local().storage().data(),
        group->weights().compute().local().storage().data());
  });
}

TEST_P(ParamGroups, NamedShardsCoverEachParameter) {
  const GroupCase& c = GetParam();
  for (const Granularity matrix :
       {Granularity::element(), Granularity::row(), Granularity::tensor()}) {
    std::mutex mutex;
    std::map<std::string, at::Tensor> counts;
    run_ranks(c.world(), [&](RankContext& context) {
      const auto group = make_group(
          c,
          context.mesh(c.axes()),
          kMixed,
          GradScaling::mean,
          1,
          matrix);
      const auto& parameters = group->parameters();
      const auto shards = group->main_shards();
      std::map<std::string, const GroupParameter*> by_name;
      for (const GroupParameter& p : parameters) {
        by_name[p.names.front()] = &p;
      }
      std::size_t seen = 0;
      for (const NamedShard& shard : shards) {
        const GroupParameter& p = *by_name.at(shard.name());
        ++seen;
        EXPECT_EQ(shard.names, p.names);
        EXPECT_EQ(shard.shape, p.shape);
        EXPECT_EQ(shard.attributes, p.attributes);
        const std::int64_t n = shard.tensor.numel();
        EXPECT_TRUE(shard.tensor.equal(initial(p).narrow(0, shard.begin, n)));
        EXPECT_TRUE(
            n == 0 || shard.tensor.data_ptr<float>() ==
                          group->weights().main().local().data_ptr<float>() +
                              shard.local_offset);
        const std::lock_guard lock(mutex);
        at::Tensor& count = counts[shard.name()];
        if (!count.defined()) {
          count = at::zeros({c10::multiply_integers(p.shape)});
        }
        count.narrow(0, shard.begin, n) += 1.0 / group->replicas().count;
      }
      EXPECT_GE(seen, parameters.size());
    });
    ASSERT_EQ(counts.size(), 4U);
    for (const auto& [name, count] : counts) {
      EXPECT_TRUE(at::allclose(count, at::ones_like(count)))
          << name << " with " << matrix.to_string();
    }
  }
}

TEST_P(ParamGroups, WholeWeightsAreTheSameOnAllRanks) {
  const GroupCase& c = GetParam();
  for (const auto& [matrix, precision, keeps] :
       std::vector<std::tuple<Granularity, Precision, bool>>{
           {Granularity::element(), kMixed, true},
           {Granularity::row(), kMixed, true},
           {Granularity::element(), Precision::full(), true},
           {Granularity::row(), Precision::full(), true},
           {Granularity::element(), kMixed, false},
           {Granularity::row(), kMixed, false},
           {Granularity::tensor(), kMixed, false}}) {
    run_ranks(c.world(), [&](RankContext& context) {
      const auto group = make_group(
          c,
          context.mesh(c.axes()),
          precision,
          GradScaling::mean,
          1,
          matrix,
          /*grads_in_reduce_dtype=*/false,
          keeps);
      if (!keeps && c.strategy.find("zero3") != std::string::npos) {
        EXPECT_FALSE(group->weights().resident());
        EXPECT_EQ(group->weights().nbytes().compute, 0);
      }
      const at::Tensor out =
          at::full({group->layout().numel()}, 5.0, precision.compute);
      const auto expect_weights = [&](double offset) {
        const auto first = group->weights().plan_gather();
        EXPECT_EQ(first.refresh, group->weights().has_refresh());
        EXPECT_TRUE(first.is_first);
        const auto second = group->weights().plan_gather();
        EXPECT_FALSE(second.refresh);
        EXPECT_FALSE(second.is_first);
        group->weights().gather(kComputePlane, kWhole, out, first);
        if (group->weights().resident()) {
          out.copy_(group->weights().compute().local());
        }
        for (std::size_t i = 0; i < group->parameters().size(); ++i) {
          const at::Tensor want =
              (initial(group->parameters()[i]) + offset).to(precision.compute);
          const at::Tensor got = out.narrow(
              0,
              group->layout().tensor_offset(i),
              group->layout().tensor_numel(i));
          EXPECT_TRUE(got.equal(want)) << group->parameters()[i].names[0];
        }
        EXPECT_EQ(padding_sum(group->layout(), out), 0);
      };
      expect_weights(0);
      EXPECT_FALSE(group->weights().adopt_foreign_writes());
      const std::int64_t generation = group->weights().version();
      for (const NamedShard& shard : group->main_shards()) {
        shard.tensor.add_(1.5);
      }
      EXPECT_TRUE(group->weights().adopt_foreign_writes());
      EXPECT_FALSE(group->weights().adopt_foreign_writes());
      EXPECT_GT(group->weights().version(), generation);
      expect_weights(1.5);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    ParamGroups,
    ::testing::ValuesIn(all_cases()),
    ::testing::PrintToStringParamName());

TEST(ParamGroup, GivenValuesWinOverDrawnOnes) {
  run_ranks(2, [](RankContext& context) {
    const at::Tensor values = at::arange(70, at::kFloat).view({10, 7});
    ParamGroup group(
        {.parameters =
             {{.names = {"w"},
               .shape = {10, 7},
               .init = InitSpec::ones(),
               .values = values}},
         .mesh = context.mesh(),
         .strategy = Strategy::named("zero3", 1)},
        {.precision = kMixed},
        Initializer(0));
    const at::Tensor out = at::empty({group.layout().numel()}, at::kBFloat16);
    group.weights()
        .gather(kComputePlane, kWhole, out, group.weights().plan_gather());
    EXPECT_TRUE(out.narrow(0, 0, 70).equal(values.flatten().to(at::kBFloat16)));
    EXPECT_FALSE(group.parameters()[0].values.defined());
  });
}

TEST(ParamGroup, FrozenGroupsHaveNoMainWeights) {
  run_ranks(2, [](RankContext& context) {
    ParamGroup group(
        {.parameters = some_parameters(),
         .mesh = context.mesh(),
         .strategy = Strategy::named("zero1", 1),
         .trainable = false},
        {.precision = kMixed},
        Initializer(kGroupSeed));
    EXPECT_EQ(group.weights().nbytes().main, 0);
    EXPECT_EQ(group.weights().main().dtype(), at::kBFloat16);
    EXPECT_FALSE(group.weights().has_refresh());
    const at::Tensor out = at::empty({group.layout().numel()}, at::kBFloat16);
    group.weights()
        .gather(kComputePlane, kWhole, out, group.weights().plan_gather());
    out.copy_(group.weights().compute().local());
    EXPECT_TRUE(out.narrow(0, group.layout().tensor_offset(0), 70)
                    .equal(initial(group.parameters()[0]).to(at::kBFloat16)));
  });
}

TEST(ParamGroup, ShardsOfOtherTensors) {
  run_ranks(2, [](RankContext& context) {
    const auto group = make_group({"zero3", {2}}, context.mesh());
    const at::Tensor state =
        at::arange(group->weights().main().local().numel(), at::kFloat);
    for (const NamedShard& shard : group->shards_of(state)) {
      if (shard.tensor.numel() > 0) {
        EXPECT_EQ(shard.tensor[0].item<double>(), shard.local_offset);
      }
    }
    try {
      group->shards_of(at::zeros({3}));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      EXPECT_THAT(error.message(), HasSubstr("block, got 3"));
    }
  });
}

std::string
refusal(Strategy strategy, ParamGroupOptions options, bool peers_read = false) {
  try {
    ParamGroup(
        {.parameters = some_parameters(),
         .mesh = Mesh::single(at::kCPU),
         .strategy = std::move(strategy),
         .peers_read = peers_read},
        std::move(options),
        Initializer(0));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config) << error.what();
    return error.message();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

TEST(ParamGroup, ErrorsNameTheOption) {
  const Strategy zero3 = Strategy::named("zero3", 1);
  EXPECT_THAT(
      refusal(Strategy::named("hsdp", 2), {}),
      HasSubstr("strategy hsdp is for 2 mesh axes"));
  EXPECT_THAT(
      refusal(zero3, {.grad_divisor = 0}),
      HasSubstr("grad_divisor > 0, got 0"));
  EXPECT_THAT(
      refusal(
          zero3,
          {.keep_compute_weights = false},
          /*peers_read=*/true),
      HasSubstr("choose one of copy_engines and keep_compute_weights"));
  const auto with = [&](Precision precision) {
    return refusal(zero3, {.precision = precision});
  };
  EXPECT_THAT(with({.compute = at::kLong}), HasSubstr("precision.compute"));
  EXPECT_THAT(with({.reduce = at::kDouble}), HasSubstr("precision.reduce"));
  EXPECT_THAT(
      with({.main_params = at::kByte}),
      HasSubstr("precision.main_params"));
  EXPECT_THAT(
      with({.main_grads = at::kInt}),
      HasSubstr("precision.main_grads"));
  EXPECT_THAT(
      with({.compute = at::kFloat, .main_params = at::kBFloat16}),
      HasSubstr("precision.main_params to be at least as wide"));
}

TEST(ParamGroup, AHookChangesWhatWasReduced) {
  for (const GroupCase& c :
       {GroupCase{"zero0", {2}},
        GroupCase{"zero2", {2}},
        GroupCase{"zero3", {2}},
        GroupCase{"hfsdp", {2, 2}}}) {
    for (const Precision& precision :
         {Precision{.reduce = at::kBFloat16}, Precision::full()}) {
      run_ranks(c.world(), [&](RankContext& context) {
        const auto mesh = context.mesh(c.axes());
        const auto plain = make_group(c, mesh, precision);
        const auto hooked = make_group(c, mesh, precision);
        int calls = 0;
        hooked->gradients().set_hook([&](const at::Tensor& reduced) {
          ++calls;
          EXPECT_EQ(reduced.scalar_type(), precision.reduce);
          EXPECT_EQ(reduced.numel(), hooked->weights().main().local().numel());
          reduced.mul_(2);
        });
        for (const bool last : {false, true}) {
          for (ParamGroup* group : {plain.get(), hooked.get()}) {
            const at::Tensor gradient = at::arange(group->layout().numel())
                                            .remainder(7)
                                            .to(precision.reduce);
            group->gradients().reduce(
                gradient,
                group->plan_reduction(true, last));
          }
        }
        EXPECT_GE(calls, 1);
        EXPECT_TRUE(hooked->gradients().reduced().local().equal(
            plain->gradients().reduced().local() * 2))
            << c.strategy;
        hooked->gradients().set_hook([](const at::Tensor&) {
          throw std::runtime_error("not this one");
        });
        const at::Tensor gradient =
            at::ones({hooked->layout().numel()}, precision.reduce);
        EXPECT_THROW(
            hooked->gradients().reduce(
                gradient,
                hooked->plan_reduction(true, true)),
            std::runtime_error);
      });
    }
  }
}

}  // namespace
}  // namespace flatshard::testing
