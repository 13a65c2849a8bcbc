#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <random>

#include "flatshard/buffer/flat_buffer.h"
#include "flatshard/buffer/redistribution.h"
#include "flatshard/buffer/transition.h"
#include "flatshard/core/error.h"
#include "tests/buffer/placements.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::PA;
using testing::PS;
using testing::R;
using testing::RankContext;
using testing::run_ranks;
using testing::S;

using Layout = std::shared_ptr<const FlatLayout>;
using Coordinates = std::vector<std::int64_t>;

// 1 to 8 tensors of up to 3 dimensions, also scalars and empty ones.
Layout random_layout(std::int64_t num_shards, bool rows, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  std::vector<TensorSpec> specs;
  const std::int64_t count = draw(1, 8);
  for (std::int64_t i = 0; i < count; ++i) {
    TensorSpec spec;
    spec.name = fmt::format("tensor{}", i);
    for (std::int64_t d = draw(0, 3); d > 0; --d) {
      spec.shape.push_back(draw(0, 12));
    }
    spec.granularity = rows ? Granularity::row() : Granularity::element(16);
    specs.push_back(std::move(spec));
  }
  return std::make_shared<FlatLayout>(
      FlatLayout::build(std::move(specs), num_shards));
}

// Returns the value that a rank adds at flat element `index`: small whole
// numbers, so that sums are exact in bfloat16. Only partial axes distinguish
// ranks.
double addend(
    std::int64_t index,
    const Placements& from,
    const Coordinates& coordinate) {
  std::int64_t value = index * 7;
  for (std::size_t a = 0; a < from.size(); ++a) {
    if (from[a].is_partial()) {
      value += (coordinate[a] + 1) * (5 + 6 * static_cast<std::int64_t>(a));
    }
  }
  return static_cast<double>(value % 15 - 7);
}

// Returns the value after the reductions over the axes from `axis` on: the
// plain definition, element by element.
double reduced(
    std::int64_t index,
    const Mesh& mesh,
    const Placements& from,
    const Placements& to,
    Coordinates coordinate,
    std::size_t axis = 0) {
  if (axis == from.size()) {
    return addend(index, from, coordinate);
  }
  if (!from[axis].is_partial() || to[axis].is_partial()) {
    return reduced(index, mesh, from, to, coordinate, axis + 1);
  }
  const std::int64_t size = mesh.axis(static_cast<int>(axis)).size;
  double sum = 0;
  for (std::int64_t c = 0; c < size; ++c) {
    coordinate[axis] = c;
    sum += reduced(index, mesh, from, to, coordinate, axis + 1);
  }
  const bool avg = from[axis].reduce_op() == ReduceOp::avg;
  return avg ? sum / static_cast<double>(size) : sum;
}

Coordinates coordinates_of(const Mesh& mesh) {
  Coordinates result;
  for (int a = 0; a < mesh.num_axes(); ++a) {
    result.push_back(mesh.coordinate(a));
  }
  return result;
}

// Returns the local tensor of `buffer`'s rank, filled through the definition.
template <class F>
at::Tensor filled(const FlatBuffer& buffer, F&& value) {
  std::vector<double> values(buffer.local().numel());
  for (const LocalRange& range : buffer.local_ranges()) {
    for (std::int64_t i = 0; i < range.numel; ++i) {
      values[range.local_offset + i] = value(range.offset + i);
    }
  }
  return at::tensor(values, at::kDouble);
}

FlatBuffer make_source(
    const Layout& layout,
    const std::shared_ptr<Mesh>& mesh,
    const Placements& from,
    at::ScalarType dtype) {
  FlatBuffer source(layout, mesh, from, dtype);
  const Coordinates coordinate = coordinates_of(*mesh);
  source.local().copy_(filled(source, [&](std::int64_t i) {
    return addend(i, from, coordinate);
  }));
  return source;
}

// Sums are exact; each of at most two averages and the storage round once.
double tolerance(at::ScalarType dtype) {
  constexpr double kMaxAbs = 7.0 * 8;
  const double eps = dtype == at::kFloat ? 0x1p-24 : 0x1p-9;
  return 3 * eps * kMaxAbs;
}

void expect_result(
    const FlatBuffer& result,
    const Placements& from,
    const Placements& to,
    const std::string& what) {
  const Mesh& mesh = *result.mesh();
  const Coordinates coordinate = coordinates_of(mesh);
  const at::Tensor expected = filled(result, [&](std::int64_t i) {
    return reduced(i, mesh, from, to, coordinate);
  });
  const at::Tensor error = (result.local().to(at::kDouble) - expected).abs();
  EXPECT_EQ(result.placements(), to);
  EXPECT_TRUE(
      error.le(tolerance(result.dtype())).all().item<bool>())  // false for NaN
      << what << " " << to_string(from) << " -> " << to_string(to)
      << ", largest error " << error.max().item<double>();
}

std::vector<Placements> all_placements(int num_axes) {
  std::vector<Placements> result{{}};
  for (int a = 0; a < num_axes; ++a) {
    std::vector<Placements> longer;
    for (const Placements& head : result) {
      for (const Placement& p : {R, S, PA, PS}) {
        longer.push_back(head);
        longer.back().push_back(p);
      }
    }
    result = std::move(longer);
  }
  return result;
}

bool is_legal(const Placements& from, const Placements& to) {
  try {
    plan_transition(from, to);
    return true;
  } catch (const Error&) {
    return false;
  }
}

struct PairsCase {
  std::vector<MeshAxis> axes;
  int num_legal_pairs;

  friend void PrintTo(const PairsCase& self, std::ostream* out) {
    for (const MeshAxis& axis : self.axes) {
      *out << axis.name << ": " << axis.size << " ";
    }
  }
};

class AllPairs : public ::testing::TestWithParam<PairsCase> {};

TEST_P(AllPairs, EqualTheDefinition) {
  const auto& [axes, num_legal_pairs] = GetParam();
  int world = 1;
  for (const MeshAxis& axis : axes) {
    world *= static_cast<int>(axis.size);
  }
  run_ranks(
      world,
      [&axes = axes, &num = num_legal_pairs](RankContext& context) {
        const auto mesh = context.mesh(axes);
        const auto lists = all_placements(mesh->num_axes());
        std::uint64_t seed = 0;
        int num_pairs = 0;
        for (const Placements& from : lists) {
          for (const Placements& to : lists) {
            if (!is_legal(from, to)) {
              continue;
            }
            ++num_pairs;
            for (const auto dtype : {at::kFloat, at::kBFloat16}) {
              ++seed;
              const auto layout =
                  random_layout(context.world, seed % 2 == 0, seed);
              const FlatBuffer source = make_source(layout, mesh, from, dtype);
              const at::Tensor before = source.local().clone();
              const FlatBuffer made = source.redistribute(to, Purpose::gather);
              expect_result(made, from, to, "made");

              const FlatBuffer out(layout, mesh, to, dtype);
              out.local().fill_(std::numeric_limits<float>::quiet_NaN());
              source.redistribute(to, Purpose::reduce, &out);
              expect_result(out, from, to, "out");
              EXPECT_TRUE(source.local().equal(before)) << "the source changed";
            }
          }
        }
        EXPECT_EQ(num_pairs, num);
      });
}

// 4 equal pairs, S->R, PA->R, PS->R, PA->S, PS->S, R->S, R->PA.
constexpr int kPairsOfOneAxis = 11;
// The outer axis may be sharded only where the inner one is. Outer pairs: 6
// without S go with 11 inner ones, S->S with 1, S->R with 2, and the 3 that
// become S with 4.
constexpr int kPairsOfTwoAxes = 6 * 11 + 1 + 2 + 3 * 4;

INSTANTIATE_TEST_SUITE_P(
    Meshes,
    AllPairs,
    ::testing::Values(
        PairsCase{{{"dp", 1}}, kPairsOfOneAxis},
        PairsCase{{{"dp", 2}}, kPairsOfOneAxis},
        PairsCase{{{"dp", 3}}, kPairsOfOneAxis},
        PairsCase{{{"dp", 4}}, kPairsOfOneAxis},
        PairsCase{{{"dp", 5}}, kPairsOfOneAxis},
        PairsCase{{{"dp", 8}}, kPairsOfOneAxis},
        PairsCase{{{"outer", 2}, {"dp", 2}}, kPairsOfTwoAxes},
        PairsCase{{{"outer", 2}, {"dp", 4}}, kPairsOfTwoAxes},
        PairsCase{{{"outer", 4}, {"dp", 2}}, kPairsOfTwoAxes},
        PairsCase{{{"outer", 1}, {"dp", 3}}, kPairsOfTwoAxes}));

TEST(Redistribute, GathersInPlace) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.mesh({{"outer", 2}, {"dp", 2}});
    const auto layout = random_layout(4, false, 3);
    const FlatBuffer whole(layout, mesh, {R, R}, at::kFloat);
    const FlatBuffer reference = make_source(layout, mesh, {S, S}, at::kFloat);
    const LocalRange range = reference.local_ranges().front();
    const FlatBuffer own = FlatBuffer::wrap(
        whole.local().narrow(0, range.offset, range.numel),
        layout,
        mesh,
        {S, S});
    own.local().copy_(reference.local());
    own.redistribute({R, R}, Purpose::gather, &whole);
    expect_result(whole, {S, S}, {R, R}, "in place");

    // All-gathering over the outer axis gives the contiguous inner shard.
    const FlatBuffer inner = own.redistribute({R, S}, Purpose::gather);
    expect_result(inner, {S, S}, {R, S}, "outer axis");
  });
}

TEST(Redistribute, R12_ReducesInPlace) {
  run_ranks(3, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto layout = random_layout(3, true, 5);
    const FlatBuffer source = make_source(layout, mesh, {PS}, at::kFloat);
    const FlatBuffer out = FlatBuffer::wrap(source.local(), layout, mesh, {R});
    source.redistribute({R}, Purpose::reduce, &out);
    expect_result(out, {PS}, {R}, "in place");
  });
}

TEST(Redistribute, LocalChangesAreViews) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto layout = random_layout(2, false, 9);
    const FlatBuffer source = make_source(layout, mesh, {R}, at::kFloat);
    const auto base = [](const FlatBuffer& b) {
      return static_cast<const float*>(b.local().const_data_ptr());
    };
    const FlatBuffer shard = source.redistribute({S}, Purpose::gather);
    EXPECT_EQ(base(shard), base(source) + shard.local_ranges().front().offset);
    EXPECT_EQ(base(source.redistribute({R}, Purpose::gather)), base(source));
    EXPECT_EQ(base(source.redistribute({PA}, Purpose::gather)), base(source));
    EXPECT_TRUE(context.log->records().empty());
  });
}

TEST(Redistribute, B58_OneRankNeverScales) {
  const auto mesh = Mesh::single(at::kCPU);
  const auto layout = random_layout(1, false, 9);
  const FlatBuffer source = make_source(layout, mesh, {PA}, at::kFloat);
  EXPECT_TRUE(
      source.redistribute({S}, Purpose::reduce).local().equal(source.local()));
}

Layout two_segments(std::int64_t num_shards) {
  return std::make_shared<FlatLayout>(FlatLayout::build(
      {{"a", {40, 48}, Granularity::row()},
       {"b", {40, 80}, Granularity::row()}},
      num_shards));
}

TEST(Redistribute, R8_SegmentsGoInOneLaunch) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto layout = two_segments(2);
    ASSERT_GT(layout->segments().size(), 1u);
    const FlatBuffer shard = make_source(layout, mesh, {S}, at::kFloat);
    const FlatBuffer whole = shard.redistribute({R}, Purpose::gather);
    expect_result(whole, {S}, {R}, "segments");
    const FlatBuffer partial = make_source(layout, mesh, {PA}, at::kFloat);
    partial.redistribute({S}, Purpose::reduce);
    const std::vector<CollectiveRecord> expected{
        {0,
         "dp.gather",
         CollectiveKind::all_gather,
         layout->numel(),
         at::kFloat},
        {1,
         "dp.reduce",
         CollectiveKind::reduce_scatter,
         layout->numel(),
         at::kFloat}};
    EXPECT_EQ(context.log->records(), expected);
  });
}

TEST(Redistribute, MakesGroupsOfSomeAxes) {
  run_ranks(8, [](RankContext& context) {
    const auto mesh = context.mesh({{"pp", 2}, {"outer", 2}, {"dp", 2}});
    const auto layout = random_layout(4, false, 2);
    const FlatBuffer source =
        make_source(layout, mesh, {R, S, S}, at::kBFloat16);
    expect_result(
        source.redistribute({R, R, R}, Purpose::gather),
        {R, S, S},
        {R, R, R},
        "three axes");
    const auto records = context.log->records();
    ASSERT_EQ(records.size(), 1u);
    EXPECT_EQ(records[0].communicator, "outer+dp.gather");
  });
}

TEST(Redistribution, OnePlanServesManyTensors) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.mesh({{"outer", 2}, {"dp", 2}});
    const auto layout = random_layout(4, true, 6);
    const Placements from{PS, PA};
    for (const Placements& to : {Placements{R, S}, Placements{R, R}}) {
      const Redistribution change(layout, mesh, from, to, Purpose::reduce);
      EXPECT_TRUE(change.communicates());
      EXPECT_EQ(change.from_numel(), layout->numel());
      EXPECT_EQ(change.to_numel(), FlatBuffer::local_numel(*layout, *mesh, to));
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kFloat}) {
        const FlatBuffer source = make_source(layout, mesh, from, dtype);
        const FlatBuffer out(layout, mesh, to, dtype);
        change.run(source.local(), out.local());
        expect_result(out, from, to, "out");
        const at::Tensor made = change.run(source.local());
        EXPECT_TRUE(made.equal(out.local()));
      }
    }
  });
}

TEST(Redistribution, GivesBackWhatDoesNotChange) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh({{"dp", 2}});
    const auto layout = random_layout(2, false, 3);
    const at::Tensor whole = make_source(layout, mesh, {R}, at::kFloat).local();
    for (const Placements& to : {Placements{R}, Placements{PA}}) {
      const Redistribution change(layout, mesh, {R}, to, Purpose::gather);
      EXPECT_FALSE(change.communicates());
      EXPECT_EQ(change.run(whole).data_ptr(), whole.data_ptr());
    }
    const Redistribution slice(layout, mesh, {R}, {S}, Purpose::gather);
    const at::Tensor part = slice.run(whole);
    EXPECT_EQ(part.numel(), whole.numel() / 2);
    EXPECT_NE(part.data_ptr(), whole.data_ptr());
  });
}

TEST(Redistribute, SubMeshOfALargerMesh) {
  run_ranks(4, [](RankContext& context) {
    const auto mesh = context.mesh({{"pp", 2}, {"dp", 2}})->sub_mesh({"dp"});
    const auto layout = random_layout(2, false, 4);
    const FlatBuffer source = make_source(layout, mesh, {PA}, at::kFloat);
    expect_result(
        source.redistribute({R}, Purpose::reduce),
        {PA},
        {R},
        "sub-mesh");
  });
}

TEST(Redistribute, B5_RefusesSharedMemoryThatWouldCorrupt) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto layout = random_layout(2, false, 3);
    const FlatBuffer source = make_source(layout, mesh, {PA}, at::kFloat);
    const std::int64_t half = layout->numel() / 2;
    const FlatBuffer slice = FlatBuffer::wrap(
        source.local().narrow(0, half * context.rank, half),
        layout,
        mesh,
        {S});
    EXPECT_THAT(
        message_of([&] { source.redistribute({S}, Purpose::reduce, &slice); }),
        HasSubstr("redistribute from [Partial(avg)] to [Shard]: `out` must "
                  "not overlap the source's memory"));
    // An all-gather whose source is the other rank's slice.
    const FlatBuffer whole =
        FlatBuffer::wrap(source.local(), layout, mesh, {R});
    const FlatBuffer other = FlatBuffer::wrap(
        source.local().narrow(0, half * (1 - context.rank), half),
        layout,
        mesh,
        {S});
    EXPECT_THAT(
        message_of([&] { other.redistribute({R}, Purpose::gather, &whole); }),
        HasSubstr("must not overlap"));
    // With several segments a shard is not contiguous in the full buffer.
    const auto segments = two_segments(2);
    const FlatBuffer all(segments, mesh, {R}, at::kFloat);
    const FlatBuffer part = FlatBuffer::wrap(
        all.local().narrow(0, 0, segments->shard_numel()),
        segments,
        mesh,
        {S});
    EXPECT_THAT(
        message_of([&] { part.redistribute({R}, Purpose::gather, &all); }),
        HasSubstr("must not overlap"));
    EXPECT_TRUE(context.log->records().empty());
    // With separate memory the result is right.
    expect_result(
        source.redistribute({S}, Purpose::reduce),
        {PA},
        {S},
        "not aliased");
  });
}

TEST(Redistribute, ChecksOut) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const auto twin = context.mesh({{"dp", 2}}, "twin");
    const auto layout = random_layout(2, false, 3);
    const FlatBuffer source(layout, mesh, {S}, at::kFloat);
    const auto refused = [&](const FlatBuffer& out) {
      return message_of(
          [&] { source.redistribute({R}, Purpose::gather, &out); });
    };
    const std::string head =
        "redistribute from [Shard] to [Replicate]: expected `out` with ";
    EXPECT_THAT(
        refused(FlatBuffer(layout, mesh, {PA}, at::kFloat)),
        HasSubstr(head + "placements [Replicate], got [Partial(avg)]"));
    EXPECT_THAT(
        refused(FlatBuffer(layout, mesh, {R}, at::kBFloat16)),
        HasSubstr(head + "dtype Float, got BFloat16"));
    EXPECT_THAT(
        refused(FlatBuffer(layout, twin, {R}, at::kFloat)),
        HasSubstr(head + "the source's mesh {dp: 2}, got another mesh"));
    EXPECT_THAT(
        refused(FlatBuffer(random_layout(2, false, 4), mesh, {R}, at::kFloat)),
        HasSubstr(head + "the source's layout of numel"));
    EXPECT_THAT(
        refused(FlatBuffer::wrap(
            at::empty({layout->numel()}, at::kMeta),
            layout,
            mesh,
            {R})),
        HasSubstr(head + "device cpu, got meta"));
    EXPECT_THAT(refused(FlatBuffer()), HasSubstr("got an empty one"));
    EXPECT_THAT(
        message_of([&] { source.redistribute({PA}, Purpose::gather); }),
        HasSubstr("cannot redistribute from [Shard] to [Partial(avg)]"));
  });
}

}  // namespace
}  // namespace flatshard
