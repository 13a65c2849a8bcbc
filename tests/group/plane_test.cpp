#include "flatshard/group/plane.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/group/float8_groups.h"
#include "tests/support/message_of.h"

// Codecs on their own, without a group: what planes they make, and that
// encoding, deriving and viewing fit together.
namespace flatshard::testing {
namespace {

// A codec of these parameters on one rank, with main weights and memory for
// its stored planes.
struct CodecOnOneRank {
  std::vector<GroupParameter> parameters;
  GroupContext context;
  std::unique_ptr<Codec> codec;
  std::vector<Plane> planes;
  FlatBuffer main;

  CodecOnOneRank(
      std::vector<GroupParameter> of,
      std::optional<Float8Format> format)
      : parameters(std::move(of)) {
    const auto mesh = Mesh::single(at::kCPU);
    context.name = "block";
    context.strategy = Strategy::named("zero3", 1);
    context.mesh = context.model_mesh = mesh;
    context.options.float8 = format;
    context.parameters = &parameters;
    context.plan = GroupPlan(shape_of(context));
    main = buffer(context.plan.layout, at::kFloat);
    at::manual_seed(7);
    for (std::int64_t i = 0; i < num_parameters(); ++i) {
      value(i).copy_(at::randn(parameters[i].shape));
    }
    codec = make_codec(context);
    planes = planes_of(context);
    for (Plane& plane : planes) {
      if (plane.stored()) {
        plane.shard = plane.resting = buffer(plane.layout, plane.dtype);
      }
    }
  }

  FlatBuffer buffer(
      const std::shared_ptr<const FlatLayout>& layout,
      at::ScalarType dtype) const {
    FlatBuffer buffer(layout, context.mesh, context.whole(), dtype);
    buffer.local().zero_();
    return buffer;
  }
  at::Tensor value(std::int64_t i) const { return main.view(i); }
  std::int64_t num_parameters() const {
    return context.plan.layout->num_tensors();
  }

  // Returns every plane unsharded, in memory laid out like a buffer.
  std::vector<at::Tensor> encoded() {
    codec->begin(main, /*encoded=*/nullptr);
    std::vector<at::Tensor> slots;
    for (const Plane& plane : planes) {
      if (plane.stored()) {
        codec->encode(plane, kWhole, main, plane.shard.local());
        slots.push_back(plane.shard.local());
      } else {
        slots.push_back(at::zeros({plane.whole.nbytes}, at::kByte));
      }
    }
    for (std::size_t id = 0; id < planes.size(); ++id) {
      const Plane& plane = planes[id];
      if (!plane.empty() && !plane.stored()) {
        codec->derive(
            plane,
            kWhole,
            planes[plane.source],
            slots[plane.source],
            slots[id]);
      }
    }
    return slots;
  }
};

at::Tensor bytes_of(const at::Tensor& t) {
  return t.clone(at::MemoryFormat::Contiguous).reshape({-1}).view(at::kByte);
}

void expect_equal(const auto& got, const auto& want, const std::string& what) {
  EXPECT_TRUE(bytes_of(got.data).equal(bytes_of(want.data))) << what;
  EXPECT_TRUE(bytes_of(got.scales).equal(bytes_of(want.scales))) << what;
}

TEST(Plane, OfACastIsTheGroupInComputesDtype) {
  CodecOnOneRank c(some_parameters(), std::nullopt);
  ASSERT_EQ(c.planes.size(), 1);
  const Plane& compute = c.planes[kComputePlane];
  EXPECT_TRUE(compute.stored() && compute.in_forward && compute.in_backward);
  EXPECT_FALSE(compute.on_request);
  EXPECT_FALSE(c.context.plan.storage.encodes);
  EXPECT_EQ(compute.whole.nbytes, 2 * c.context.plan.layout->numel());
  const at::Tensor slot = c.encoded()[kComputePlane];
  EXPECT_EQ(slot.scalar_type(), at::kBFloat16);
  for (std::int64_t i = 0; i < c.num_parameters(); ++i) {
    const PlaneView view = c.codec->view(compute, kWhole, i, slot);
    EXPECT_TRUE(view.data.equal(c.value(i).to(at::kBFloat16))) << i;
    EXPECT_FALSE(view.scales.defined());
  }
}

TEST(Plane, OfACastIsNotDerived) {
  CodecOnOneRank c(some_parameters(), std::nullopt);
  const Plane& compute = c.planes[kComputePlane];
  EXPECT_NE(
      message_of([&] {
        c.codec->derive(compute, kWhole, compute, {}, {});
      }).find("plane compute is not derived"),
      std::string::npos);
}

TEST(Plane, Float8GroupsHaveRowsForTheForwardAndColumnsForTheBackward) {
  for (const Float8Format& format : formats()) {
    const CodecOnOneRank c(matrices(format), format);
    const std::string what = name_of(format);
    ASSERT_EQ(c.planes.size(), 3) << what;
    const Plane& rows = c.planes[1];
    const Plane& columns = c.planes[2];
    EXPECT_TRUE(c.planes[kComputePlane].empty()) << what;
    EXPECT_TRUE(rows.stored() && rows.in_forward && !rows.in_backward) << what;
    EXPECT_TRUE(!columns.in_forward && columns.in_backward) << what;
    EXPECT_EQ(columns.source, format.stored_columns ? kStored : 1) << what;
    EXPECT_TRUE(rows.on_request && columns.on_request) << what;
    EXPECT_TRUE(c.context.plan.storage.encodes) << what;
  }
}

TEST(Plane, PartsAreTheWholeInPieces) {
  for (const Float8Format& format : formats()) {
    const CodecOnOneRank c(matrices(format), format);
    for (const Plane& plane : c.planes) {
      const std::string what = name_of(format) + std::string(plane.name);
      if (plane.empty() || format.gather_parts == GatherParts::unit) {
        EXPECT_TRUE(plane.parts.empty()) << what;
        continue;
      }
      ASSERT_EQ(plane.parts.size(), 3) << what;
      std::int64_t nbytes = 0;
      std::int64_t next = 0;
      for (const PlanePart& part : plane.parts) {
        EXPECT_EQ(part.first_parameter, next) << what;
        next += part.num_parameters;
        nbytes += part.nbytes;
      }
      EXPECT_EQ(next, c.num_parameters()) << what;
      EXPECT_EQ(nbytes, plane.whole.nbytes) << what;
    }
  }
}

TEST(Codec, EncodesAndDerivesPartByPartWhatTheWholeHas) {
  for (const Float8Format& format : formats()) {
    CodecOnOneRank c(matrices(format), format);
    const std::vector<at::Tensor> whole = c.encoded();
    const auto num_parts = static_cast<PartId>(c.planes[1].parts.size());
    for (PartId part = 0; part < num_parts; ++part) {
      std::vector<at::Tensor> slots;
      for (const Plane& plane : c.planes) {
        const std::int64_t nbytes = plane.empty() ? 0 : plane.part(part).nbytes;
        // Earlier contents do not matter.
        slots.push_back(at::full({nbytes}, 0x55, at::kByte));
        if (plane.stored()) {
          c.codec->encode(plane, part, c.main, slots.back());
        } else if (!plane.empty()) {
          c.codec->derive(
              plane,
              part,
              c.planes[plane.source],
              slots[plane.source],
              slots.back());
        }
      }
      for (PlaneId id = 1; id < 3; ++id) {
        const Plane& plane = c.planes[id];
        const PlanePart& at = plane.part(part);
        for (std::int64_t i = at.first_parameter;
             i < at.first_parameter + at.num_parameters;
             ++i) {
          expect_equal(
              c.codec->view(plane, part, i, slots[id]),
              c.codec->view(plane, kWhole, i, whole[id]),
              name_of(format) + std::string(plane.name));
        }
      }
    }
  }
}

TEST(Codec, EncodesWhatQuantizeGives) {
  for (const Float8Format& format : formats()) {
    if (format.recipe == float8::Recipe::blockwise) {
      continue;  // 1 / scale instead of 448 / amax: a bit apart
    }
    CodecOnOneRank c(matrices(format), format);
    const std::vector<at::Tensor> slots = c.encoded();
    for (std::int64_t i = 0; i < c.num_parameters(); ++i) {
      const std::string what = name_of(format) + std::to_string(i);
      expect_equal(
          c.codec->view(c.planes[1], kWhole, i, slots[1]),
          float8::quantize(c.value(i), format.quantizer()),
          what);
      if (format.stored_columns) {
        expect_equal(
            c.codec->view(c.planes[2], kWhole, i, slots[2]),
            float8::quantize(
                c.value(i),
                format.quantizer(),
                {.axis = float8::Axis::column, .transpose = false}),
            what);
      }
    }
  }
}

// Derived columns are the rows' values, transposed. They are the same bytes, or
// re-encoded values. With power-of-two scales, re-encoding is lossless except
// for underflow.
TEST(Codec, DerivesTheValuesOfTheSource) {
  for (const Float8Format& format : formats()) {
    if (format.stored_columns) {
      continue;
    }
    CodecOnOneRank c(matrices(format), format);
    const std::vector<at::Tensor> slots = c.encoded();
    for (std::int64_t i = 0; i < c.num_parameters(); ++i) {
      const at::Tensor rows = float8::dequantize(
          values(c.codec->view(c.planes[1], kWhole, i, slots[1])),
          format.recipe);
      const float8::Plane columns =
          values(c.codec->view(c.planes[2], kWhole, i, slots[2]));
      EXPECT_EQ(columns.data.size(0), c.parameters[i].shape[1]);
      const at::Tensor back = float8::dequantize(columns, format.recipe).t();
      const bool requantized = float8::has_power_of_two_scales(format.recipe);
      if (requantized) {
        expect_equal(
            columns,
            float8::quantize(
                rows,
                format.quantizer(),
                {.axis = float8::Axis::column}),
            name_of(format));
      } else {
        EXPECT_TRUE(back.equal(rows)) << name_of(format);
      }
    }
  }
}

TEST(Codec, WhatAWriterEncodedReplacesWhatItFinds) {
  for (const Float8Format& format : formats()) {
    CodecOnOneRank c(matrices(format), format);
    const PlaneWriter* writer = c.codec->writer(c.main, c.planes);
    const bool needs_all_rows =
        format.recipe == float8::Recipe::rowwise && format.stored_columns;
    ASSERT_EQ(writer == nullptr, needs_all_rows) << name_of(format);
    if (writer == nullptr) {
      continue;
    }
    if (!writer->amax.defined()) {
      // The rows themselves: their writer has encoded them.
      const at::Tensor rows = c.planes[1].shard.local();
      EXPECT_TRUE(writer->data.is_alias_of(rows)) << name_of(format);
      rows.fill_(0x11);
      c.codec->begin(c.main, writer);
      c.codec->encode(c.planes[1], kWhole, c.main, rows);
      EXPECT_TRUE(rows.eq(0x11).all().item<bool>()) << name_of(format);
      c.codec->begin(c.main, /*encoded=*/nullptr);
      c.codec->encode(c.planes[1], kWhole, c.main, rows);
      EXPECT_FALSE(rows.eq(0x11).all().item<bool>()) << name_of(format);
      continue;
    }
    // Twice the largest magnitudes: other scales than main weights have.
    c.codec->begin(c.main, /*encoded=*/nullptr);
    const Plane& rows = c.planes[1];
    c.codec->encode(rows, kWhole, c.main, rows.shard.local());
    const at::Tensor own =
        c.codec->view(rows, kWhole, 0, rows.shard.local()).scales.clone();
    writer->amax.fill_(2.0F * c.main.local().abs().max().item<float>());
    c.codec->begin(c.main, writer);
    const at::Tensor given =
        c.codec->view(rows, kWhole, 0, rows.shard.local()).scales;
    EXPECT_TRUE(given.gt(own).all().item<bool>()) << name_of(format);
  }
}

TEST(Float8Parts, MoreWeightsThanPartsAreNamed) {
  const Float8Format format{.recipe = float8::Recipe::rowwise};
  ::testing::internal::CaptureStderr();
  const auto parts = format.parts_of(30);
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      ::testing::HasSubstr(
          "30 FP8 weights of one unit are all-gathered in 24"));
  EXPECT_EQ(std::set<std::int64_t>(parts.begin(), parts.end()).size(), 24U);
}

}  // namespace
}  // namespace flatshard::testing
