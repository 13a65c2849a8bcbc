// Mistakes that sharded runtimes are known to have made
// (docs/dev/regressions.md): wrapping, first values and options.
#include "tests/runtime/twin.h"

#include "flatshard/group/initializer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using testing::CellImpl;
using testing::check;
using testing::for_strategies;
using testing::forward_backward;
using testing::Lab;
using testing::LabImpl;
using testing::RankContext;
using testing::run_ranks;
using testing::Twin;

TEST(Pitfalls, B2_AttributesReachTheShards) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    const Twin twin(
        context,
        [](LabImpl& lab) {
          lab.cells[1]->set_attribute("gain", "weight_decay", "none");
          lab.cells[1]->set_attribute("gain", "note", "mine");
        },
        options);
    for (const auto& shard : twin.group_of("cell1.gain").main_shards()) {
      if (shard.name() == "cell1.gain") {
        EXPECT_EQ(shard.attributes.at("weight_decay"), "none");
        EXPECT_EQ(shard.attributes.at("note"), "mine");
      } else {
        EXPECT_TRUE(shard.attributes.empty()) << shard.name();
      }
    }
  });
}

TEST(Pitfalls, R10_ParametersStayTheTensorsThatLayersHold) {
  run_ranks(2, [](const RankContext& context) {
    Twin twin(context, [](LabImpl& lab) {
      lab.cells[0]->gain.set_requires_grad(false);
      lab.cells[0]->set_attribute("gain", "note", "mine");
    });
    const auto found = nn::named_parameters(*twin.sharded);
    const auto gain = std::ranges::find(
        found,
        std::string("cell0.gain"),
        &nn::NamedParameter::name);
    ASSERT_NE(gain, found.end());
    EXPECT_TRUE(gain->tensor.is_same(twin.sharded->cells[0]->gain));
    EXPECT_EQ(gain->info->attributes.at("note"), "mine");
    EXPECT_FALSE(gain->tensor.requires_grad());
    EXPECT_FALSE(twin.group_of("cell0.gain").trainable());
    EXPECT_TRUE(twin.sharded->cells[0]->up->weight().requires_grad());
    EXPECT_TRUE(twin.sharded->cells[0]->up->weight().is_leaf());
    EXPECT_TRUE(twin.group_of("cell0.up.weight").trainable());
  });
}

TEST(Pitfalls, B8_FirstValuesAreThoseOfOneRank) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    const Twin twin(context, {}, options);
    for (const auto& unit : twin.runtime->units()) {
      for (const auto& group : unit->groups()) {
        for (const NamedShard& shard : group->main_shards()) {
          EXPECT_TRUE(shard.tensor.equal(
              twin.plain_parameters.at(shard.name())
                  .detach()
                  .flatten()
                  .narrow(0, shard.begin, shard.tensor.numel())))
              << shard.name();
        }
      }
    }
  });
}

// Ranks that store the same weights without sharding them together.
TEST(Pitfalls, B9_ReplicasOutsideTheMeshStartEqual) {
  constexpr std::uint64_t kSeed = 12;
  run_ranks(4, [](const RankContext& context) {
    const auto mesh = context.mesh({{"replica", 2}, {"dp", 2}});
    Lab lab;
    const auto runtime = fully_shard(
        *lab,
        mesh->sub_mesh({"dp"}),
        {.units = lab->units(),
         .seed = kSeed,
         .group = {.precision = Precision::full()}});
    for (const ParamGroup* group : runtime->groups()) {
      for (const NamedShard& shard : group->main_shards()) {
        const auto index = group->layout().find(shard.name()).value();
        at::Tensor expected = at::empty({shard.tensor.numel()});
        Initializer(kSeed).fill(
            expected,
            shard.name(),
            group->parameters()[index].init,
            shard.begin);
        EXPECT_TRUE(shard.tensor.equal(expected)) << shard.name();
      }
    }
  });
  // Nor does the number of draws before matter, or change.
  const at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor before = generator.get_state();
  Lab lab;
  const auto runtime = fully_shard(*lab, Mesh::single(at::kCPU), {});
  EXPECT_TRUE(generator.get_state().equal(before));
}

TEST(Pitfalls, B32_WhatHasMemoryKeepsItsValues) {
  run_ranks(2, [](const RankContext& context) {
    Lab lab;
    const at::Tensor buffer = lab->register_buffer("table", at::arange(5));
    const at::Tensor values = at::arange(12, at::kFloat);
    nn::set_parameter_data(lab->cells[1]->gain, values.clone());
    const auto runtime = fully_shard(
        *lab,
        context.mesh(),
        {.units = lab->units(), .group = {.precision = Precision::full()}});
    EXPECT_TRUE(buffer.equal(at::arange(5)));
    EXPECT_TRUE(lab->named_buffers()["table"].is_same(buffer));
    for (const ParamGroup* group : runtime->groups()) {
      for (const NamedShard& shard : group->main_shards()) {
        if (shard.name() == "cell1.gain") {
          EXPECT_TRUE(shard.tensor.equal(
              values.narrow(0, shard.begin, shard.tensor.numel())));
        }
      }
    }
  });
}

TEST(Pitfalls, R21_EveryOptionHasAnEffect) {
  run_ranks(2, [](const RankContext& context) {
    Lab lab;
    nn::set_parameter_data(lab->scale, at::ones({12}));
    const auto runtime = fully_shard(
        *lab,
        context.mesh(),
        {.units = lab->units(),
         .strategy = "zero3",
         .granularity = Granularity::row(),
         .placement_of =
             [](const std::string& name) {
               return ParameterPlacement{
                   .granularity = name == "cell0.gain" ? Granularity::tensor()
                                                       : Granularity::block(2)};
             },
         .ignore =
             [](const std::string& name) { return name.ends_with("scale"); },
         .group =
             {.precision = Precision::full(),
              .scaling = GradScaling::sum,
              .grad_divisor = 3,
              .grads_in_reduce_dtype = true,
              .keep_compute_weights = false,
              .alignment = 64},
         .runtime =
             {.prefetch = 3,
              .reshard_after_forward = false,
              .streams = {.max_delay_us = 2000},
              .trace = true}});
    runtime->exposed_waits().measure(true);
    EXPECT_EQ(runtime->scheduler().options().prefetch, 3);
    EXPECT_FALSE(runtime->scheduler().units()[1].policy.reshard_after_forward);
    EXPECT_TRUE(runtime->units()[0]->groups().empty());
    const ParamGroup& group = *runtime->units()[1]->groups()[0];
    EXPECT_EQ(group.options().scaling, GradScaling::sum);
    EXPECT_EQ(group.options().grad_divisor, 3);
    EXPECT_TRUE(group.options().grads_in_reduce_dtype);
    EXPECT_FALSE(group.options().keep_compute_weights);
    EXPECT_EQ(group.options().alignment, 64);
    EXPECT_EQ(group.options().precision.compute, at::kFloat);
    const FlatLayout& layout = group.layout();
    EXPECT_EQ(
        layout.spec(layout.find("cell0.gain").value()).granularity,
        Granularity::tensor());
    EXPECT_EQ(
        layout.spec(layout.find("cell0.up.weight").value()).granularity,
        Granularity::block(2));
    lab->cells[0](at::ones({2, 12})).sum().backward();
    EXPECT_GT(runtime->exposed_waits().wait_and_take_ms(), 0);
    EXPECT_FALSE(runtime->trace().actions.empty());
    Lab other;
    const auto rows = fully_shard(
        *other,
        context.mesh({{"dp", 2}}, "rows"),
        {.granularity = Granularity::row()});
    EXPECT_EQ(
        rows->groups()[0]->layout().spec(0).granularity,
        Granularity::row());
  });
}

TEST(Pitfalls, R29_WrappingRunsNoCollective) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    const Twin twin(context, {}, options);
    EXPECT_TRUE(context.log->records().empty());
  });
}

void nest_units(LabImpl& lab) {
  lab.choose_units = [](LabImpl& l) {
    std::vector<nn::Module*> units;
    for (auto& cell : l.cells) {
      units.push_back(cell.get());
    }
    units.push_back(l.cells[1]->up.get());
    units.push_back(l.cells[3]->up.get());
    return units;
  };
}

TEST(Pitfalls, R17_UnitsInsideUnits) {
  check(nest_units, forward_backward);
  run_ranks(2, [](const RankContext& context) {
    const Twin twin(context, nest_units);
    std::map<std::string, UnitId> ids;
    for (const auto& unit : twin.runtime->units()) {
      ids[unit->name()] = unit->id();
    }
    ASSERT_EQ(ids.size(), 7U);
    const auto& specs = twin.runtime->scheduler().units();
    EXPECT_EQ(specs[ids.at("cell1.up")].parent, ids.at("cell1"));
    EXPECT_EQ(specs[ids.at("cell3.up")].parent, ids.at("cell3"));
    EXPECT_EQ(specs[ids.at("cell1")].parent, 0);
  });
}

TEST(Pitfalls, B54_EachParameterBelongsToOneUnit) {
  run_ranks(2, [](const RankContext& context) {
    const Twin twin(context, nest_units);
    std::map<std::string, std::string> owners;
    for (const auto& unit : twin.runtime->units()) {
      for (const auto& group : unit->groups()) {
        for (const GroupParameter& p : group->parameters()) {
          EXPECT_TRUE(owners.emplace(p.names.front(), unit->name()).second)
              << p.names.front();
        }
      }
    }
    EXPECT_EQ(owners.size(), twin.plain_parameters.size());
    EXPECT_EQ(owners.at("cell1.up.weight"), "cell1.up");
    EXPECT_EQ(owners.at("cell1.gain"), "cell1");
  });
}

// The unit has no direct weight and never calls the child that has.
TEST(Pitfalls, B31_AUnitWhoseWeightsAreOnItsChildren) {
  const auto configure = [](LabImpl& lab) {
    lab.cells[1]->body = [](CellImpl& c, at::Tensor x) {
      return at::tanh(at::linear(x, c.up->weight(), c.up->bias()));
    };
  };
  check(configure, forward_backward);
  run_ranks(2, [&](const RankContext& context) {
    const Twin twin(context, configure);
    std::vector<std::string> names;
    for (const auto& p : twin.runtime->units()[2]->parameters()) {
      names.push_back(p.name);
    }
    EXPECT_EQ(
        names,
        (std::vector<std::string>{
            "cell1.gain",
            "cell1.spare",
            "cell1.up.weight",
            "cell1.up.bias"}));
  });
}

TEST(Pitfalls, R19_AModelWithoutUnits) {
  check(
      [](LabImpl& lab) {
        lab.choose_units = [](LabImpl&) { return std::vector<nn::Module*>{}; };
      },
      forward_backward);
}

// The reduce dtype is what goes over the wire, apart from all others.
TEST(Pitfalls, R6_GradientsTravelInTheReduceDtype) {
  for (const at::ScalarType reduce : {at::kBFloat16, at::kFloat}) {
    run_ranks(2, [&](const RankContext& context) {
      Lab lab;
      const auto runtime = fully_shard(
          *lab,
          context.mesh(),
          {.units = lab->units(),
           .group = {
               .precision = {.compute = at::kBFloat16, .reduce = reduce}}});
      const at::Tensor x = at::ones({2, 12}, at::kBFloat16);
      lab(x).sum().backward();
      runtime->set_sync_gradients(false);
      lab(x).sum().backward();
      runtime->set_sync_gradients(true);
      lab(x).sum().backward();  // with what was accumulated
      runtime->synchronize();
      int num_reductions = 0;
      for (const CollectiveRecord& record : context.log->records()) {
        if (record.kind == CollectiveKind::reduce_scatter) {
          ++num_reductions;
          EXPECT_EQ(record.dtype, reduce);
        }
      }
      EXPECT_EQ(num_reductions, 2 * 5);
      EXPECT_EQ(
          runtime->groups()[0]->gradients().reduced().buffer().dtype(),
          at::kFloat);
    });
  }
}

}  // namespace
}  // namespace flatshard
