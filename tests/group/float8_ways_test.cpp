// FP8 planes may reach a slot by other transfers than an all-gather of the
// stored planes.
#include "flatshard/group/weight_write.h"
#include "tests/group/float8_groups.h"

#include <gtest/gtest.h>

#include <mutex>
#include <tuple>

namespace flatshard::testing {
namespace {

struct Way {
  std::string name;
  bool keep_compute_weights = true;
  bool peers_read = false;
};

// At first, after a write, and after a foreign write.
std::vector<Bytes> three_gathers(ParamGroup& group, const Way& way) {
  std::vector<Bytes> all{gathered(group, way.peers_read)};
  {
    const auto stream = current_stream(at::kCPU);
    WeightWrite write({&group}, *stream);
    group.weights().main().local().mul_(2.5);
    write.end(group, WeightWrite::Cast::here);
  }
  all.push_back(gathered(group, way.peers_read));
  group.weights().readers().wait();
  group.weights().main().local().mul_(0.75);
  group.weights().adopt_foreign_writes();
  all.push_back(gathered(group, way.peers_read));
  group.weights().readers().wait();
  return all;
}

class Float8Ways : public ::testing::TestWithParam<std::tuple<Way, GroupCase>> {
};

TEST_P(Float8Ways, GiveTheSameBytes) {
  const auto& [way, c] = GetParam();
  std::mutex mutex;
  run_ranks(c.world(), [&, &way = way, &c = c](RankContext& context) {
    context.axes = c.axes();
    const auto mesh = context.mesh();
    for (const Float8Format& format : formats()) {
      const auto plain = fp8_group(c, mesh, format);
      const auto group = fp8_group(
          c,
          mesh,
          format,
          /*trainable=*/true,
          way.keep_compute_weights,
          way.peers_read);
      const auto want = three_gathers(*plain, {});
      const auto got = three_gathers(*group, way);
      std::ostringstream what;
      what << name_of(format) << " " << c;
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < want.size(); ++i) {
        expect_same(got[i], want[i], what.str());
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways,
    Float8Ways,
    ::testing::Combine(
        ::testing::Values(
            Way{.name = "MadeForEachGather", .keep_compute_weights = false},
            Way{.name = "CopiedFromPeers", .peers_read = true}),
        ::testing::Values(
            GroupCase{"zero3", {2}},
            GroupCase{"zero3", {3}},
            GroupCase{"zero3", {5}},
            GroupCase{"zero1", {2}},
            GroupCase{"hsdp", {2, 2}},
            GroupCase{"hfsdp", {2, 2}})),
    [](const auto& info) {
      std::ostringstream name;
      name << std::get<0>(info.param).name << "_" << std::get<1>(info.param);
      return name.str();
    });

TEST(Float8WaysMemory, PlanesThatDoNotRestTakeNoMemory) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    for (const Float8Format& format : formats()) {
      const auto group = fp8_group(
          {"zero3", {2}},
          mesh,
          format,
          /*trainable=*/true,
          /*keep_compute_weights=*/false);
      EXPECT_TRUE(group->weights().main().defined());
      for (const Plane& plane : group->weights().planes()) {
        EXPECT_FALSE(plane.resting.defined()) << plane.name;
      }
      if (format.recipe == float8::Recipe::mxfp8) {
        EXPECT_EQ(group->weights().nbytes().compute, 0);
      }
    }
  });
}

}  // namespace
}  // namespace flatshard::testing
