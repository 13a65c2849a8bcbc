#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <mutex>

#include "flatshard/comm/collective_log.h"
#include "flatshard/group/float8_scales.h"
#include "flatshard/group/weight_write.h"
#include "tests/group/float8_groups.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard::testing {
namespace {

using float8::Recipe;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The state of one rank at first, and after the main weights were doubled.
struct Reference {
  Bytes first;
  Bytes doubled;
};

Reference reference_of(const Float8Format& format) {
  Reference reference;
  run_ranks(1, [&](RankContext& context) {
    const auto group = fp8_group({"zero3", {1}}, context.mesh(), format);
    reference.first = gathered(*group);
    group->weights().main().local().mul_(2.5);
    EXPECT_TRUE(group->weights().adopt_foreign_writes());
    reference.doubled = gathered(*group);
  });
  return reference;
}

void expect_planes_of_one_rank(
    const GroupCase& c,
    const std::vector<Reference>& references) {
  std::mutex mutex;
  run_ranks(c.world(), [&](RankContext& context) {
    context.axes = c.axes();
    const auto mesh = context.mesh();
    for (std::size_t f = 0; f < references.size(); ++f) {
      const auto group = fp8_group(c, mesh, formats()[f]);
      std::ostringstream what;
      what << name_of(formats()[f]) << " " << c;
      const Bytes first = gathered(*group);
      // Writes as a loader does.
      const auto stream = current_stream(at::kCPU);
      WeightWrite write({group.get()}, *stream);
      group->weights().main().local().mul_(2.5);
      write.end(*group, WeightWrite::Cast::here);
      const Bytes second = gathered(*group);
      const std::lock_guard lock(mutex);
      expect_same(first, references[f].first, what.str());
      expect_same(second, references[f].doubled, what.str() + ", written");
    }
  });
}

std::vector<Reference> references() {
  std::vector<Reference> all;
  for (const Float8Format& format : formats()) {
    all.push_back(reference_of(format));
  }
  return all;
}

TEST(Float8Planes, F2_AreBitwiseThoseOfOneRankForEveryStrategyAndWorld) {
  const auto expected = references();
  for (const GroupCase& c : std::vector<GroupCase>{
           {"zero0", {2}},
           {"zero1", {3}},
           {"zero2", {2}},
           {"zero3", {2}},
           {"zero3", {3}},
           {"zero3", {5}},
           {"zero3", {8}},
           {"hsdp", {2, 2}},
           {"hfsdp", {2, 2}},
           {"hsdp_zero2", {2, 2}}}) {
    expect_planes_of_one_rank(c, expected);
  }
}

// Eight ranks are more than some weights have granules: their shards are empty.
TEST(Float8PlanesMatrix, DISABLED_WholeMatrix) {
  const auto expected = references();
  for (const std::int64_t ranks : {1, 2, 3, 4, 5, 8}) {
    for (const char* strategy : {"zero0", "zero1", "zero2", "zero3"}) {
      expect_planes_of_one_rank({strategy, {ranks}}, expected);
    }
    for (const std::int64_t outer : {2, 4}) {
      if (ranks % outer == 0) {
        for (const char* strategy :
             {"hsdp", "hfsdp", "hsdp_zero1", "hsdp_zero2", "zero3"}) {
          expect_planes_of_one_rank(
              {strategy, {outer, ranks / outer}},
              expected);
        }
      }
    }
  }
}

TEST(Float8Planes, HoldWhatQuantizeGives) {
  for (const Float8Format& format : formats()) {
    const Reference reference = reference_of(format);
    for (const GroupParameter& p : matrices(format)) {
      const at::Tensor x = initial(p).view(p.shape);
      const std::string name = p.names.front();
      const auto expect_plane = [&](const std::string& plane,
                                    const float8::Plane& want) {
        EXPECT_TRUE(reference.first.at(name + plane)
                        .equal(want.data.contiguous().view(at::kByte)))
            << name_of(format) << name << plane;
        const at::Tensor scales = want.scales.contiguous();
        EXPECT_TRUE(reference.first.at(name + plane + ".scales")
                        .equal(
                            scales.scalar_type() == at::kFloat
                                ? scales
                                : scales.view(at::kByte)))
            << name_of(format) << name << plane;
      };
      // Blocks of 128 take 1 / scale instead of 448 / amax: a bit apart.
      if (format.recipe != Recipe::blockwise) {
        expect_plane(".rows", float8::quantize(x, format.quantizer()));
        if (format.stored_columns) {
          expect_plane(
              ".columns",
              float8::quantize(
                  x,
                  format.quantizer(),
                  {.axis = float8::Axis::column, .transpose = false}));
        }
      }
      // Round to nearest with 3 bits, and a power of two above amax: 1/16, of
      // the largest that shares the scale for subnormals.
      const at::Tensor data =
          reference.first.at(name + ".columns").view(at::kFloat8_e4m3fn);
      EXPECT_EQ(data.size(0), format.stored_columns ? p.shape[0] : p.shape[1]);
      const float8::Plane columns{
          data,
          format.recipe == Recipe::mxfp8
              ? reference.first.at(name + ".columns.scales")
                    .view(at::kFloat8_e8m0fnu)
              : reference.first.at(name + ".columns.scales")};
      if (format.stored_columns || format.recipe == Recipe::blockwise) {
        continue;  // their scales have strides
      }
      const at::Tensor back = float8::dequantize(
                                  columns,
                                  format.recipe,
                                  {.axis = float8::Axis::column})
                                  .t();
      const double error =
          (back - x).norm().item<double>() / x.norm().item<double>();
      EXPECT_LT(error, 0.04) << name_of(format) << name;
    }
  }
}

TEST(Float8Planes, ScalesAreThoseOfTheScalarReference) {
  at::Tensor amax = at::tensor(
      {0.0F,
       1e-45F,
       1e-38F,
       1.2e-38F,
       1e-30F,
       0.4F,
       0.4375F,
       0.44F,
       1.0F,
       447.9F,
       448.0F,
       448.1F,
       464.0F,
       65504.0F,
       3e38F,
       std::numeric_limits<float>::infinity(),
       std::numeric_limits<float>::quiet_NaN()});
  amax = at::cat({amax, at::rand({1000}).mul(100).exp2()});
  for (const Recipe recipe : {Recipe::tensorwise, Recipe::rowwise}) {
    for (const auto rounding :
         {float8::Rounding::up, float8::Rounding::floor}) {
      const float8::Quantizer q{.recipe = recipe, .rounding = rounding};
      const at::Tensor scales = float8_scales(amax, q);
      for (std::int64_t i = 0; i < amax.numel(); ++i) {
        const float of = amax[i].item<float>();
        const float want =
            recipe == Recipe::tensorwise
                ? float8::float_scale_of(of, q.format).dequantize
                : float8::decode_e8m0(float8::e8m0_of(of, q.format, rounding));
        const float got = scales[i].item<float>();
        EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
            << of << ": " << got << ", want " << want;
      }
    }
  }
}

// Largest magnitudes go over the ranks once for both planes, and not at all
// where blocks are local.
TEST(Float8Planes, F5_OneReductionOfEachLargestMagnitude) {
  const std::map<Recipe, std::int64_t> most{
      {Recipe::tensorwise, 3},
      {Recipe::rowwise, 32 + 160 + 96},
      // Blocks of rows and of columns, rows of blocks filled up to four.
      {Recipe::blockwise, 2 * (1 * 4 + 5 * 4 + 3 * 4)},
      {Recipe::mxfp8, 0}};
  run_ranks(2, [&](RankContext& context) {
    context.log = std::make_shared<CollectiveLog>();
    const auto mesh = context.mesh();
    for (const auto& [recipe, numel] : most) {
      const auto group = fp8_group({"zero3", {2}}, mesh, {.recipe = recipe});
      context.log->clear();
      gathered(*group);
      std::int64_t num_reductions = 0;
      std::int64_t reduced = 0;
      for (const CollectiveRecord& record : context.log->records()) {
        if (record.kind == CollectiveKind::all_reduce) {
          ++num_reductions;
          reduced += record.numel;
        }
      }
      EXPECT_EQ(num_reductions, recipe == Recipe::mxfp8 ? 0 : 1)
          << float8::to_string(recipe);
      // Each weight's are filled up to four.
      EXPECT_LE(reduced, numel + 3 * 3) << float8::to_string(recipe);
    }
  });
}

TEST(Float8Planes, F7_AreMadeOnceForEachChange) {
  run_ranks(1, [](RankContext& context) {
    for (const Float8Format& format : formats()) {
      const auto group = fp8_group({"zero3", {1}}, context.mesh(), format);
      WeightPlanes& weights = group->weights();
      EXPECT_TRUE(weights.plan_gather().refresh);
      EXPECT_FALSE(weights.plan_gather().refresh);
      weights.main().local().mul_(2);
      EXPECT_FALSE(weights.plan_gather().refresh);
      weights.adopt_foreign_writes();
      EXPECT_TRUE(weights.plan_gather().refresh);
      EXPECT_FALSE(weights.plan_gather().refresh);
    }
  });
}

TEST(Float8Planes, FrozenGroupsHaveThem) {
  for (const Float8Format& format : formats()) {
    run_ranks(2, [&](RankContext& context) {
      const auto group = fp8_group(
          {"zero3", {2}},
          context.mesh(),
          format,
          /*trainable=*/false);
      EXPECT_EQ(group->weights().main().dtype(), at::kBFloat16);
      const Bytes bytes = gathered(*group);
      EXPECT_FALSE(bytes.empty());
      EXPECT_GT(bytes.at("tall.rows").count_nonzero().item<std::int64_t>(), 0);
    });
  }
}

TEST(Float8Planes, F1_RestInAByteAWeightAndItsShareOfTheScales) {
  run_ranks(4, [](RankContext& context) {
    const auto of = [&](Float8Format format) {
      const auto group = fp8_group(
          {"zero3", {4}},
          context.mesh({{"dp", 4}}, name_of(format)),
          format);
      return std::pair(
          group->weights().nbytes().compute,
          group->layout().numel() / 4);
    };
    const auto [tensorwise, numel] = of({.recipe = Recipe::tensorwise});
    EXPECT_EQ(tensorwise, numel + 3 * 16);  // and three scales
    // Scales of mxfp8 are sharded with their elements.
    const auto [mx, mx_numel] = of({.recipe = Recipe::mxfp8});
    EXPECT_EQ(mx, mx_numel + mx_numel / 32);
    const auto [both, both_numel] =
        of({.recipe = Recipe::mxfp8, .stored_columns = true});
    EXPECT_EQ(both, 2 * (both_numel + both_numel / 32));
  });
}

// No columns are stored where they are made of rows.
TEST(Float8Planes, AByteAWeightRestsOnASingleRankToo) {
  run_ranks(1, [](RankContext& context) {
    for (const Recipe recipe : {Recipe::tensorwise, Recipe::mxfp8}) {
      const auto group =
          fp8_group({"zero3", {1}}, context.mesh(), {.recipe = recipe});
      const std::int64_t numel = group->layout().numel();
      EXPECT_EQ(
          group->weights().nbytes().compute,
          recipe == Recipe::mxfp8 ? numel + numel / 32 : numel + 3 * 16);
    }
  });
}

TEST(Float8Planes, WeightsThatAreNotFiniteAreNamed) {
  for (const Float8Format& format : formats()) {
    run_ranks(1, [&](RankContext& context) {
      const auto group = fp8_group({"zero3", {1}}, context.mesh(), format);
      const Piece piece = group->weights().main().local_pieces(1).at(0);
      group->weights().main().local()[piece.local_offset + 7] =
          std::numeric_limits<float>::quiet_NaN();
      group->weights().adopt_foreign_writes();
      EXPECT_THAT(
          message_of([&] { gathered(*group); }),
          AllOf(
              HasSubstr("parameter tall of block has weights that are not "
                        "finite"),
              HasSubstr("training.on_nonfinite")));
      // A program may learn the names later.
      group->set_names(1, {"model.tall"});
      group->weights().main().local()[piece.local_offset + 7] =
          std::numeric_limits<float>::quiet_NaN();
      group->weights().adopt_foreign_writes();
      EXPECT_THAT(
          message_of([&] { gathered(*group); }),
          HasSubstr("parameter model.tall of block"));
    });
  }
}

// mxfp8 has no scales in common: its blocks are in one rank's rows.
TEST(Float8Planes, ANanOfAnyRankIsInTheScalesOfAll) {
  for (const auto& [recipe, width] :
       {std::pair{Recipe::tensorwise, 64},
        {Recipe::rowwise, 64},
        // So wide that at::amax over rows processes blocks as vectors.
        {Recipe::blockwise, 64 * 128}}) {
    for (const int world : {2, 3}) {
      for (int bad = 0; bad < world; ++bad) {
        run_ranks(world, [&](RankContext& context) {
          ParamGroup group(
              GroupSpec{
                  .name = "block",
                  .parameters =
                      {{.names = {"up"},
                        .shape = {128, width},
                        .init = InitSpec::normal(0, 1)}},
                  .mesh = context.mesh(),
                  .strategy = Strategy::named("zero3", 1)},
              ParamGroupOptions{.float8 = Float8Format{.recipe = recipe}},
              Initializer(kGroupSeed));
          if (context.rank == bad) {
            const Piece piece = group.weights().main().local_pieces(0).at(0);
            group.weights().main().local()[piece.local_offset + 3] =
                std::numeric_limits<float>::quiet_NaN();
          }
          group.weights().adopt_foreign_writes();
          EXPECT_THAT(
              message_of([&] { gathered(group); }),
              HasSubstr("parameter up of block has weights that are not "
                        "finite"))
              << float8::to_string(recipe) << ", NaN on " << bad << " of "
              << world;
        });
      }
    }
  }
}

TEST(Float8Planes, WhatCannotBeFp8IsRefusedByName) {
  run_ranks(1, [](RankContext& context) {
    const auto refusal = [&](std::vector<std::int64_t> shape,
                             Float8Format format,
                             Precision precision = {}) {
      return message_of([&] {
        ParamGroup(
            {.name = "block",
             .parameters = {{.names = {"w"}, .shape = std::move(shape)}},
             .mesh = context.mesh(),
             .strategy = Strategy::named("zero3", 1)},
            {.precision = precision, .float8 = format},
            Initializer(0));
      });
    };
    EXPECT_THAT(
        refusal({64, 40}, {.recipe = Recipe::tensorwise}),
        HasSubstr("parameter w cannot be FP8 (tensorwise): 40 columns are not "
                  "a multiple of 16; exclude it"));
    EXPECT_THAT(
        refusal({64, 128}, {.recipe = Recipe::blockwise}),
        HasSubstr("64 rows are not a multiple of 128"));
    EXPECT_THAT(
        refusal({64}, {.recipe = Recipe::mxfp8}),
        HasSubstr("[64] is not a matrix"));
    EXPECT_THAT(
        refusal(
            {64, 64},
            {.recipe = Recipe::tensorwise, .stored_columns = true}),
        HasSubstr("stored_columns is not supported with tensorwise"));
    EXPECT_THAT(
        refusal({64, 64}, {}, Precision::full()),
        HasSubstr("need bfloat16 compute, got precision.compute = Float"));
  });
}

}  // namespace
}  // namespace flatshard::testing
