// A stream has the full tensors on every rank of any grid, and the changes
// since then turn the old tensors into the new ones.
#include "flatshard/checkpoint/weight_stream.h"

#include "flatshard/checkpoint/changed_weights.h"
#include "flatshard/checkpoint/float8_blocks.h"
#include "flatshard/core/error.h"
#include "flatshard/format/manifest.h"
#include "tests/checkpoint/grids.h"
#include "tests/group/float8_groups.h"
#include "tests/support/message_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Tensors = std::map<std::string, at::Tensor>;

// Also checks that metadata lists what `next` returns.
Tensors all_of(WeightStream& stream) {
  std::vector<StreamedSpec> seen;
  Tensors tensors;
  while (const auto group = stream.next()) {
    stream.gather_ahead();
    for (const auto& [name, tensor] : *group) {
      EXPECT_TRUE(tensor.is_contiguous()) << name;
      seen.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
      tensors[name] = tensor;
    }
  }
  EXPECT_EQ(seen, stream.metadata());
  return tensors;
}

// The value of a full tensor after SomeGroups::fill.
at::Tensor filled(const std::string& name, const at::Tensor& like) {
  return SomeGroups::expected(
             {.role = std::string(kWeightRole),
              .names = {name},
              .shape = like.sizes().vec(),
              .box = Rectangle::whole(like.sizes()),
              .values = at::empty({like.numel()}, like.options())})
      .view(like.sizes());
}

TEST(WeightStream, FullTensorsOnAllRanksOfAnyGrid) {
  for (const Grid& grid : grids()) {
    SCOPED_TRACE(grid.to_string());
    run_ranks(grid.world(), [&](RankContext& context) {
      const GridModel model(context, grid);
      model.groups.fill();
      for (const bool narrow : {false, true}) {
        WeightStream stream(
            model.all(),
            {.dtype_of = narrow ? dtype_of_weights(at::kBFloat16) : DtypeOf()});
        const Tensors tensors = all_of(stream);
        EXPECT_EQ(tensors.size(), 10u);
        for (const auto& [name, tensor] : tensors) {
          EXPECT_EQ(tensor.scalar_type(), narrow ? at::kBFloat16 : at::kFloat);
          EXPECT_TRUE(tensor.equal(filled(name, tensor))) << name;
        }
        EXPECT_FALSE(stream.next().has_value());
      }
      EXPECT_THAT(model.groups.wrong(), IsEmpty());
    });
  }
}

TEST(WeightStream, OnlyRank0AssemblesIfAskedTo) {
  run_ranks(2, [&](RankContext& context) {
    const GridModel model(context, {.tp = 2});
    model.groups.fill();
    WeightStream stream(model.all(), {.on_rank_0 = true});
    while (const auto group = stream.next()) {
      for (const auto& [name, tensor] : *group) {
        const bool everywhere =
            name.starts_with("norm") || name.starts_with("router");
        EXPECT_EQ(tensor.defined(), context.rank == 0 || everywhere) << name;
        if (tensor.defined()) {
          EXPECT_TRUE(tensor.equal(filled(name, tensor))) << name;
        }
      }
    }
  });
}

TEST(WeightStream, ARankThatHasAllOfAGroupCopiesNothing) {
  run_ranks(1, [&](RankContext& context) {
    const GridModel model(context, {});
    WeightStream stream(model.all());
    for (const ParamGroup* group : model.all()) {
      const at::Tensor& main = group->weights().main().local();
      const auto tensors = stream.next();
      for (const auto& [name, tensor] : *tensors) {
        EXPECT_TRUE(tensor.is_alias_of(main)) << name;
      }
    }
  });
}

// Parameters of two groups are rows of one tensor.
TEST(WeightStream, RowsOfATensorMayBelongToSeveralGroups) {
  const auto parameter = [](const char* name, std::int64_t rows) {
    return GroupParameter{
        .names = {name},
        .shape = {rows, 3},
        .init = InitSpec::normal(0, 1)};
  };
  const StoredEntriesOf entries_of =
      [](const std::string& name, const std::vector<std::int64_t>& shape) {
        StoredEntry entry{"qk", shape, name == "q" ? 0 : 4, 6};
        return std::vector<StoredEntry>{
            name == "o" ? StoredEntry{name, shape} : entry};
      };
  run_ranks(2, [&](RankContext& context) {
    const auto mesh = context.mesh();
    const SomeGroups model(
        {{.parameters = {parameter("q", 4), parameter("o", 2)}},
         {.parameters = {parameter("k", 2)}}},
        {},
        mesh);
    model.fill();
    WeightStream stream(
        {model.groups.begin(), model.groups.end()},
        {.entries_of = entries_of});
    const Tensors tensors = all_of(stream);
    EXPECT_EQ(tensors.size(), 2u);
    EXPECT_EQ(stream.metadata().front().name, "o");
    EXPECT_TRUE(tensors.at("qk").equal(at::cat(
        {filled("q", at::empty({4, 3})), filled("k", at::empty({2, 3}))})));

    EXPECT_THAT(
        message_of([&] {
          WeightStream({model.groups.front()}, {.entries_of = entries_of});
        }),
        HasSubstr("tensor qk: expected parameters for all of its rows, got 4"));
    EXPECT_THAT(
        message_of([] { WeightStream({}); }),
        HasSubstr("expected at least one group"));
  });
}

TEST(WeightStream, WeightsInFloat8ComeFromMainWeights) {
  run_ranks(2, [&](RankContext& context) {
    const auto group = fp8_group({"zero3", {2}}, context.mesh(), {});
    const auto version = group->weights().version();
    WeightStream stream({group.get()}, {.dtype_of = compute_dtype_of});
    const at::Tensor all =
        group->weights()
            .main()
            .redistribute({Placement::replicate()}, Purpose::gather)
            .local();
    const FlatBuffer full = FlatBuffer::wrap(
        all,
        group->weights().main().layout_ptr(),
        group->mesh(),
        {Placement::replicate()});
    const auto tensors = stream.next();
    for (std::size_t i = 0; i < tensors->size(); ++i) {
      EXPECT_TRUE(
          (*tensors)[i].tensor.equal(full.view(static_cast<std::int64_t>(i))
                                         .to(compute_dtype_of(*group))));
    }
    EXPECT_EQ(group->weights().version(), version);
    EXPECT_FALSE(group->weights().progress().is_gathered());
  });
}

TEST(ChangedWeights, OldAndChangesAreNew) {
  for (const Grid& grid : grids()) {
    SCOPED_TRACE(grid.to_string());
    run_ranks(grid.world(), [&](RankContext& context) {
      const GridModel model(context, grid);
      model.groups.fill();
      Tensors tensors;
      {
        WeightStream stream(model.all());
        for (const auto& [name, tensor] : all_of(stream)) {
          tensors[name] = tensor.clone();
        }
      }
      ChangedWeights changed(model.all());
      while (const auto group = changed.next()) {
        EXPECT_THAT(*group, IsEmpty());
      }
      EXPECT_TRUE(changed.finish(true));
      const auto change = [&](double number) {
        for (const OwnedBox& each : owned_boxes(model.groups.groups, nullptr)) {
          each.values.masked_fill_(each.values.remainder(5).eq(1), number);
        }
      };
      const auto apply = [&] {
        std::int64_t num = 0;
        while (const auto group = changed.next()) {
          for (const auto& [name, shape, indices, values] : *group) {
            EXPECT_EQ(indices.scalar_type(), at::kInt);
            EXPECT_TRUE(indices.diff().gt(0).all().item<bool>()) << name;
            EXPECT_EQ(tensors.at(name).sizes(), at::IntArrayRef(shape));
            tensors.at(name).view(-1).index_put_(
                {indices.to(at::kLong)},
                values);
            num += values.numel();
          }
        }
        return num;
      };
      change(-3);
      const std::int64_t num = apply();
      EXPECT_GT(num, 0);
      WeightStream stream(model.all());
      for (const auto& [name, tensor] : all_of(stream)) {
        EXPECT_TRUE(tensor.equal(tensors.at(name))) << name;
      }
      EXPECT_EQ(apply(), 0);

      EXPECT_TRUE(changed.finish(true));

      // Patches that one rank could not send are returned again.
      model.groups.fill();
      EXPECT_EQ(apply(), num);
      EXPECT_EQ(changed.finish(context.rank != 0), false);
      EXPECT_EQ(apply(), num);
      // Some ranks sent them, so they are also returned if the weights have
      // the values from before.
      EXPECT_EQ(changed.finish(context.rank != 0), false);
      change(-3);
      EXPECT_EQ(apply(), num);
      EXPECT_TRUE(changed.finish(true));
      EXPECT_EQ(apply(), 0);
      EXPECT_TRUE(changed.finish(true));

      // The groups that a pass leaves out are not sent.
      model.groups.fill();
      std::int64_t num_first = 0;
      const auto first = changed.next();
      for (const ChangedParameter& parameter : *first) {
        num_first += parameter.values.numel();
      }
      EXPECT_TRUE(changed.finish(true));
      EXPECT_EQ(apply(), num - num_first);
      EXPECT_TRUE(changed.finish(true));

      // `apply` checks the order of the elements of few ranks.
      for (int rank = 0; rank < grid.world(); ++rank) {
        if (context.rank == rank || context.rank == rank + 1) {
          model.groups.fill_with(-4 - rank);
        }
        apply();
        EXPECT_TRUE(changed.finish(true));
      }
    });
  }
}

TEST(Float8Blocks, ScalesOfPartialBlocksAndNames) {
  EXPECT_TRUE(is_linear_of_a_block("model.layers.0.mlp.up_proj.weight", 2));
  EXPECT_FALSE(is_linear_of_a_block("model.layers.0.mlp.up_proj.weight", 3));
  EXPECT_FALSE(is_linear_of_a_block("model.embed_tokens.weight", 2));
  EXPECT_EQ(block_scales_name("a.weight"), "a.weight_scale_inv");
  const at::Tensor weight = at::arange(130 * 200, at::kFloat).view({130, 200});
  const float8::Plane plane = quantize_blocks("a.weight", weight, "");
  EXPECT_EQ(plane.data.sizes(), weight.sizes());
  EXPECT_EQ(
      plane.scales.sizes(),
      at::IntArrayRef(block_scales_shape({130, 200})));
  weight[3][3] = NAN;
  EXPECT_THAT(
      message_of([&] { quantize_blocks("a.weight", weight, "send later"); }),
      HasSubstr("a.weight has values that are not finite, and no FP8 scale "
                "fits them; send later"));
}

}  // namespace
}  // namespace flatshard::testing
