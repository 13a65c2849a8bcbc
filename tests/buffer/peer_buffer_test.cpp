// Copies from the peers' shards equal an all-gather.
#include "flatshard/buffer/peer_buffer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/buffer/placements.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using testing::R;
using testing::RankContext;
using testing::run_ranks;
using testing::S;

struct PeerCase {
  std::vector<MeshAxis> axes;
  Placements placements;
};

class PeerBuffers : public ::testing::TestWithParam<PeerCase> {};

TEST_P(PeerBuffers, CopiesEqualAnAllGather) {
  const auto& [axes, placements] = GetParam();
  int world = 1;
  int num_shards = 1;
  for (std::size_t a = 0; a < axes.size(); ++a) {
    world *= static_cast<int>(axes[a].size);
    num_shards *= placements[a].is_shard() ? static_cast<int>(axes[a].size) : 1;
  }
  // Elements, rows, and mixes of granularities, so several segments.
  const std::vector<std::vector<Granularity>> granularities{
      {Granularity::element(), Granularity::element()},
      {Granularity::row(), Granularity::row()},
      {Granularity::row(), Granularity::element()},
      {Granularity::tensor(), Granularity::element()}};
  for (const auto& of : granularities) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto layout = std::make_shared<const FlatLayout>(FlatLayout::build(
          {{"matrix", {13, 7}, of[0]},
           {"vector", {37}, of[1]},
           {"empty", {0, 4}, of[1]}},
          num_shards));
      run_ranks(world, [&](RankContext& context) {
        const auto mesh = context.mesh(axes);
        const PeerBuffer buffer(layout, mesh, placements, dtype);
        const Placements everywhere(axes.size(), R);
        const at::Tensor got = at::full({layout->numel()}, -1, dtype);
        for (int round = 1; round <= 3; ++round) {
          // Ranks with the same elements write the same values.
          const at::Tensor& local = buffer.local().local();
          std::int64_t begin = 0;
          for (const LocalRange& range : buffer.local().local_ranges()) {
            local.narrow(0, range.local_offset, range.numel)
                .copy_((at::arange(range.numel) + range.offset + 3 * round)
                           .remainder(97));
            begin += range.numel;
          }
          ASSERT_EQ(begin, local.numel());
          buffer.fence();
          buffer.copy_whole(got);
          std::vector<at::Tensor> parts;
          for (const Segment& segment : layout->segments()) {
            parts.push_back(at::full({segment.numel}, -1, dtype));
            buffer.copy_segments(
                static_cast<std::int64_t>(parts.size()) - 1,
                1,
                parts.back());
          }
          const FlatBuffer want =
              buffer.local().redistribute(everywhere, Purpose::gather);
          EXPECT_TRUE(got.equal(want.local())) << c10::toString(dtype);
          EXPECT_TRUE(at::cat(parts).equal(want.local()));
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Meshes,
    PeerBuffers,
    ::testing::Values(
        PeerCase{{{"dp", 2}}, {S}},
        PeerCase{{{"dp", 3}}, {S}},
        PeerCase{{{"outer", 2}, {"dp", 2}}, {R, S}},
        PeerCase{{{"outer", 2}, {"dp", 3}}, {S, S}}));

}  // namespace
}  // namespace flatshard
