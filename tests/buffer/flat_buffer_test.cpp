#include "flatshard/buffer/flat_buffer.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "tests/buffer/placements.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::R;
using testing::RankContext;
using testing::run_ranks;
using testing::S;

std::shared_ptr<const FlatLayout> make_layout(
    std::int64_t num_shards,
    Granularity granularity = {}) {
  return std::make_shared<FlatLayout>(FlatLayout::build(
      {{"weight", {6, 10}, granularity},
       {"bias", {10}, granularity},
       {"scale", {}, granularity},
       {"none", {0, 4}, granularity},
       {"wide", {3, 48}, granularity}},
      num_shards));
}

TEST(FlatBuffer, ViewsShareTheMemory) {
  const auto layout = make_layout(1);
  const auto mesh = Mesh::single(at::kCPU);
  const FlatBuffer buffer(layout, mesh, {R}, at::kDouble);
  EXPECT_EQ(buffer.local().numel(), layout->numel());
  EXPECT_EQ(buffer.dtype(), at::kDouble);
  EXPECT_EQ(buffer.nbytes(), 8 * layout->numel());
  for (std::int64_t i = 0; i < layout->num_tensors(); ++i) {
    const at::Tensor view = buffer.view(i);
    EXPECT_EQ(view.sizes(), at::IntArrayRef(layout->spec(i).shape));
    view.fill_(i + 1.0);
    EXPECT_TRUE(buffer.local()
                    .narrow(0, layout->tensor_offset(i), view.numel())
                    .eq(i + 1.0)
                    .all()
                    .item<bool>());
  }
}

// Every rank's pieces together are each tensor exactly once.
TEST(FlatBuffer, PiecesOfAllRanksCoverEachTensor) {
  for (const auto& granularity : {Granularity{}, Granularity::row()}) {
    run_ranks(4, [&](RankContext& context) {
      const auto mesh = context.mesh({{"outer", 2}, {"dp", 2}});
      const auto layout = make_layout(4, granularity);
      for (const Placements& placements :
           {Placements{S, S}, Placements{R, S}, Placements{R, R}}) {
        const FlatBuffer buffer(layout, mesh, placements, at::kFloat);
        for (std::int64_t i = 0; i < layout->num_tensors(); ++i) {
          const at::Tensor count = at::zeros({layout->tensor_numel(i)});
          for (const Piece& piece : buffer.local_pieces(i)) {
            EXPECT_LE(piece.local_offset + piece.numel, buffer.local().numel());
            count.narrow(0, piece.tensor_offset, piece.numel) += 1;
          }
          mesh->world().all_reduce(count, ReduceOp::sum);
          const double copies = placements[1] == R   ? 4
                                : placements[0] == R ? 2
                                                     : 1;
          EXPECT_TRUE(count.eq(copies).all().item<bool>())
              << layout->spec(i).name << " " << to_string(placements);
        }
      }
    });
  }
}

TEST(FlatBuffer, ViewNeedsTheWholeSpace) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const FlatBuffer shard(make_layout(2), mesh, {S}, at::kFloat);
    EXPECT_THAT(
        message_of([&] { shard.view(0); }),
        HasSubstr("the full tensor 'weight' is available only if no axis is "
                  "sharded; use local_pieces"));
  });
  // An axis of size 1 shards nothing.
  const FlatBuffer all(make_layout(1), Mesh::single(at::kCPU), {S}, at::kFloat);
  EXPECT_EQ(all.view(0).sizes(), (at::IntArrayRef{6, 10}));
}

TEST(FlatBuffer, WrapTakesMemoryAndChecksIt) {
  const auto layout = make_layout(1);
  const auto mesh = Mesh::single(at::kCPU);
  const at::Tensor memory = at::ones({layout->numel()});
  const auto buffer = FlatBuffer::wrap(memory, layout, mesh, {R});
  EXPECT_EQ(buffer.local().const_data_ptr(), memory.const_data_ptr());
  EXPECT_EQ(
      buffer.to_string(),
      fmt::format(
          "FlatBuffer [Replicate] on {{dp: 1}}, Float cpu, {0} of {0} "
          "elements",
          layout->numel()));
  EXPECT_THAT(
      message_of([&] { FlatBuffer::wrap(at::ones({3}), layout, mesh, {R}); }),
      HasSubstr(fmt::format(
          "expected a contiguous 1-D tensor of {} elements, got 3 elements in "
          "1 dimensions",
          layout->numel())));
  EXPECT_THAT(
      message_of([&] { FlatBuffer::wrap({}, layout, mesh, {R}); }),
      HasSubstr("got none"));
  EXPECT_THAT(
      message_of([&] { FlatBuffer::wrap(memory, {}, mesh, {R}); }),
      HasSubstr("needs a layout and a mesh"));
  EXPECT_FALSE(FlatBuffer().defined());
  EXPECT_THAT(
      message_of([&] { FlatBuffer().redistribute({R}, Purpose::gather); }),
      HasSubstr("expected a buffer, got an empty one"));
}

}  // namespace
}  // namespace flatshard
