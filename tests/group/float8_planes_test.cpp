#include "flatshard/group/float8_planes.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <mutex>

#include "flatshard/group/float8_scales.h"
#include "flatshard/group/weight_write.h"
#include "tests/group/groups.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard::testing {
namespace {

using float8::Recipe;
using ::testing::HasSubstr;
using enum Float8Planes::Plane;

std::vector<Float8Format> formats() {
  std::vector<Float8Format> all;
  for (const Recipe recipe :
       {Recipe::tensorwise,
        Recipe::rowwise,
        Recipe::blockwise,
        Recipe::mxfp8}) {
    all.push_back({.recipe = recipe});
    if (float8::has_power_of_two_scales(recipe)) {
      all.push_back({.recipe = recipe, .stored_columns = true});
    }
  }
  all.push_back({.recipe = Recipe::mxfp8, .rounding = float8::Rounding::floor});
  all.push_back({.recipe = Recipe::rowwise, .cut_in_parts = false});
  return all;
}

std::string name_of(const Float8Format& f) {
  return std::string(float8::to_string(f.recipe)) +
         (f.stored_columns ? ", stored columns" : ", derived columns") +
         (f.cut_in_parts ? "" : ", one part");
}

// Widths that no segment shares, and rows that no number of ranks divides.
std::vector<GroupParameter> matrices(const Float8Format& format) {
  const std::int64_t n = format.recipe == Recipe::blockwise ? 128 : 32;
  std::vector<GroupParameter> all;
  for (const auto& [name, rows, columns, deviation] :
       {std::tuple{"wide", 1, 4, 0.02F},
        {"tall", 5, 1, 1.0F},
        {"square", 3, 3, 30.0F}}) {
    all.push_back(
        {.names = {name},
         .shape = {rows * n, columns * n},
         .init = InitSpec::normal(0, deviation)});
  }
  return all;
}

std::unique_ptr<ParamGroup> fp8_group(
    const GroupCase& c,
    std::shared_ptr<Mesh> mesh,
    const Float8Format& format,
    bool trainable = true) {
  return std::make_unique<ParamGroup>(
      GroupSpec{
          .name = "block",
          .parameters = matrices(format),
          .mesh = std::move(mesh),
          .strategy =
              Strategy::named(c.strategy, static_cast<int>(c.mesh.size())),
          .trainable = trainable},
      ParamGroupOptions{.float8 = format},
      Initializer(kGroupSeed));
}

using Bytes = std::map<std::string, at::Tensor>;

at::Tensor copy_of(const at::Tensor& t) {
  return t.contiguous().clone();
}

// All bytes of both planes by parameter, gathered whole and in parts.
Bytes gathered(ParamGroup& group) {
  WeightPlanes& weights = group.weights();
  const Float8Planes& planes = *weights.float8();
  const auto slot = [&](Float8Planes::Plane plane, int part) {
    return at::zeros(
        {planes.slot_nbytes(plane, part)},
        at::TensorOptions(at::kByte));
  };
  Bytes bytes;
  const auto add = [&](int part, const std::string& suffix) {
    std::map<Float8Planes::Plane, at::Tensor> slots;
    for (const auto plane : {kRows, kColumns}) {
      slots[plane] = slot(plane, part);
      if (!planes.stores(plane)) {
        planes.derive(part, slots[kRows], slots[plane]);
        continue;
      }
      weights.gather(plane, part, slots[plane], weights.plan_gather());
      if (weights.resident()) {
        slots[plane] = planes.resting(plane);
        if (part != Float8Planes::kWhole) {
          return;
        }
      }
    }
    for (std::size_t i = 0; i < group.parameters().size(); ++i) {
      if (part != Float8Planes::kWhole &&
          planes.part_of(static_cast<std::int64_t>(i)) != part) {
        continue;
      }
      for (const auto plane : {kRows, kColumns}) {
        const auto view = planes.view(
            plane,
            static_cast<std::int64_t>(i),
            part,
            slots[plane]);
        const std::string name = group.parameters()[i].names.front() +
                                 (plane == kRows ? ".rows" : ".columns") +
                                 suffix;
        bytes[name] = copy_of(view.data.view(at::kByte));
        bytes[name + ".scales"] = copy_of(
            view.scales.scalar_type() == at::kFloat
                ? view.scales
                : view.scales.contiguous().view(at::kByte));
      }
    }
  };
  add(Float8Planes::kWhole, "");
  for (int part = 0; part < planes.num_parts(); ++part) {
    add(part, " in parts");
  }
  return bytes;
}

void expect_same(const Bytes& got, const Bytes& want, const std::string& what) {
  EXPECT_FALSE(got.empty());
  for (const auto& [name, tensor] : got) {
    // Parts hold what the whole has.
    const std::string key = name.substr(0, name.find(" in parts")) +
                            (name.ends_with(".scales") &&
                                     name.find(" in parts") != std::string::npos
                                 ? ".scales"
                                 : "");
    EXPECT_TRUE(tensor.equal(want.at(key))) << what << ": " << name;
  }
}

// What one rank has at first, and after the main weights were doubled.
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

TEST(Float8Planes, F2_AreBitwiseThoseOfOneRankForEveryStrategyAndWorld) {
  std::vector<Reference> references;
  for (const Float8Format& format : formats()) {
    references.push_back(reference_of(format));
  }
  std::vector<GroupCase> cases{
      {"zero0", {2}},
      {"zero1", {3}},
      {"zero2", {2}},
      {"zero3", {2}},
      {"zero3", {3}},
      {"zero3", {5}},
      {"zero3", {8}},
      {"hsdp", {2, 2}},
      {"hfsdp", {2, 2}},
      {"hsdp_zero2", {2, 2}}};
  std::mutex mutex;
  for (const GroupCase& c : cases) {
    run_ranks(c.world(), [&](RankContext& context) {
      context.axes = c.axes();
      const auto mesh = context.mesh();
      for (std::size_t f = 0; f < references.size(); ++f) {
        const auto group = fp8_group(c, mesh, formats()[f]);
        std::ostringstream what;
        what << name_of(formats()[f]) << " " << c;
        const Bytes first = gathered(*group);
        // As an optimizer or a loader does it.
        const auto stream = current_stream(at::kCPU);
        WeightWrite write({group.get()}, *stream);
        group->weights().main().local().mul_(2.5);
        write.end(*group, WeightWrite::Cast::by_writer);
        const Bytes second = gathered(*group);
        const std::lock_guard lock(mutex);
        expect_same(first, references[f].first, what.str());
        expect_same(second, references[f].doubled, what.str() + ", written");
      }
    });
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
    // Scales of mxfp8 are cut with their elements.
    const auto [mx, mx_numel] = of({.recipe = Recipe::mxfp8});
    EXPECT_EQ(mx, mx_numel + mx_numel / 32);
    const auto [both, both_numel] =
        of({.recipe = Recipe::mxfp8, .stored_columns = true});
    EXPECT_EQ(both, 2 * (both_numel + both_numel / 32));
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
          HasSubstr("parameter tall of block has weights that are not finite"));
    });
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
        HasSubstr("parameter w cannot be FP8 (tensorwise): 40 columns are no "
                  "multiple of 16; exclude it"));
    EXPECT_THAT(
        refusal({64, 128}, {.recipe = Recipe::blockwise}),
        HasSubstr("64 rows are no multiple of 128"));
    EXPECT_THAT(
        refusal({64}, {.recipe = Recipe::mxfp8}),
        HasSubstr("[64] is no matrix"));
    EXPECT_THAT(
        refusal(
            {64, 64},
            {.recipe = Recipe::tensorwise, .stored_columns = true}),
        HasSubstr("expected derived columns with tensorwise"));
    EXPECT_THAT(
        refusal({64, 64}, {}, Precision::full()),
        HasSubstr("compute beside bfloat16, got precision.compute = Float"));
  });
}

}  // namespace
}  // namespace flatshard::testing
