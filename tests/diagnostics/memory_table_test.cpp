#include "flatshard/diagnostics/memory_table.h"

#include "flatshard/optim/adamw.h"
#include "tests/runtime/training.h"

#include <ATen/ATen.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kDim = 24;

struct TableCase {
  std::string strategy;
  std::vector<MeshAxis> axes;
  int microbatches = 1;
  bool no_sync = false;
  Precision precision;
  bool whole_matrices = false;  ///< layouts of two segments
  bool saves = false;  ///< gradients in the reduce dtype, no compute weights
};

int world_of(const TableCase& c) {
  int world = 1;
  for (const MeshAxis& axis : c.axes) {
    world *= static_cast<int>(axis.size);
  }
  return world;
}

// Bytes of every storage among the tensors, each counted once.
class RealBytes {
 public:
  void add(const at::Tensor& tensor) {
    if (tensor.defined()) {
      const auto& storage = tensor.storage();
      storages_[storage.unsafeGetStorageImpl()] =
          static_cast<std::int64_t>(storage.nbytes());
    }
  }
  std::int64_t sum() const {
    std::int64_t total = 0;
    for (const auto& [storage, nbytes] : storages_) {
      total += nbytes;
    }
    return total;
  }

 private:
  std::map<const void*, std::int64_t> storages_;
};

std::int64_t row(const std::vector<MemoryRow>& rows, const std::string& role) {
  for (const MemoryRow& r : rows) {
    if (r.role == role) {
      return r.nbytes;
    }
  }
  return 0;
}

TEST(MemoryTable, RowsAreTheBytesOfTheBuffers) {
  const Precision full = Precision::full();
  const Precision mixed{
      .compute = at::kBFloat16,
      .reduce = at::kBFloat16,
      .main_params = at::kFloat,
      .main_grads = at::kFloat};
  const std::vector<MeshAxis> two{{"dp", 2}};
  const std::vector<MeshAxis> four{{"outer", 2}, {"dp", 2}};
  const std::vector<TableCase> cases{
      {"zero0", two, 1, false, mixed},
      {"zero1", two, 1, false, mixed},
      {"zero1", two, 1, false, mixed, true},
      {"hfsdp", four, 2, false, mixed, true},
      {"zero2", two, 1, false, mixed},
      {"zero3", two, 1, false, mixed},
      {"zero3", two, 1, false, full},
      {"zero3", two, 1, false, mixed, false, true},
      {"zero3", two, 1, false, mixed, true, true},
      {"zero1", two, 1, false, mixed, false, true},
      {"zero3", two, 2, true, mixed},
      {"zero1", two, 2, false, mixed},
      {"hsdp", four, 2, false, mixed},
      {"hfsdp", four, 1, false, mixed},
      {"hfsdp", four, 2, false, full}};
  for (const TableCase& c : cases) {
    run_ranks(world_of(c), [&](RankContext& context) {
      ToyModel model(kDim, 3, true);
      const auto runtime = fully_shard(
          *model,
          context.mesh(c.axes),
          {.units = model->unit_modules(),
           .strategy = c.strategy,
           .placement_of =
               [&](const std::string& name) {
                 return ParameterPlacement{
                     .granularity = c.whole_matrices && name.ends_with("weight")
                                        ? Granularity::tensor()
                                        : Granularity()};
               },
           .group = {
               .precision = c.precision,
               .grads_in_reduce_dtype = c.saves,
               .keep_compute_weights = !c.saves}});
      AdamW adamw(runtime->groups(), {});
      const auto at_start = memory_rows(*runtime, adamw.state_nbytes());
      for (int m = 0; m < c.microbatches; ++m) {
        const bool last = m == c.microbatches - 1;
        runtime->set_is_last_microbatch(last);
        runtime->set_sync_gradients(last || !c.no_sync);
        const at::Tensor x = at::ones({4, kDim}, c.precision.compute);
        model(x, at::zeros({4, kDim})).backward();
      }
      adamw.step(1e-3);
      runtime->synchronize();

      RealBytes all;
      RealBytes grads;
      RealBytes states;
      std::int64_t not_final = 0;
      std::size_t num_segments = 0;
      for (const auto& unit : runtime->units()) {
        for (const auto& group : unit->groups()) {
          num_segments =
              std::max(num_segments, group->layout().segments().size());
          all.add(group->weights().main().local());
          all.add(group->weights().compute().local());
          all.add(group->weights().compute_shard());
          all.add(group->gradients().reduced().local());
          grads.add(group->gradients().reduced().local());
          not_final += group->gradients().nbytes().inner +
                       group->gradients().nbytes().local;
        }
      }
      for (std::size_t g = 0; g < adamw.groups().size(); ++g) {
        for (const auto& [name, tensor] : adamw.state(g)) {
          all.add(tensor);
          states.add(tensor);
        }
      }
      const auto rows = memory_rows(*runtime, adamw.state_nbytes());
      const std::string what =
          c.strategy + " " + std::to_string(c.microbatches);
      EXPECT_EQ(
          total_nbytes(rows),
          all.sum() + not_final +
              runtime->executor().slots().pool().arena_nbytes())
          << what;
      EXPECT_EQ(row(rows, "gradients"), grads.sum()) << what;
      EXPECT_EQ(row(rows, "optimizer state"), states.sum()) << what;
      EXPECT_EQ(
          row(rows, "slot pool"),
          runtime->executor().slots().pool().arena_nbytes())
          << what;
      EXPECT_EQ(
          row(rows, "inner gradients") + row(rows, "local gradients"),
          not_final)
          << what;
      EXPECT_EQ(row(rows, "CUDA graphs"), 0) << what;
      EXPECT_EQ(
          row(memory_rows(
                  *runtime,
                  adamw.state_nbytes(),
                  GraphStats{.nbytes = 12345}),
              "CUDA graphs"),
          12345)
          << what;
      // The facts of the start stay true.
      for (const char* role :
           {"main weights",
            "compute weights",
            "gradients",
            "optimizer state",
            "slot pool"}) {
        EXPECT_EQ(row(at_start, role), row(rows, role)) << what << role;
      }
      EXPECT_EQ(row(rows, "main weights") == 0, c.precision == full);
      EXPECT_EQ(num_segments, c.whole_matrices ? 2U : 1U) << what;
    });
  }
}

TEST(MemoryTable, Text) {
  const std::vector<MemoryRow> rows{
      {"main weights", 3 << 20, "why"},
      {"slot pool", std::int64_t{5} << 30, "because"}};
  EXPECT_EQ(total_nbytes(rows), (3 << 20) + (std::int64_t{5} << 30));
  const std::string text = to_string(rows);
  EXPECT_THAT(text, HasSubstr("main weights"));
  EXPECT_THAT(text, HasSubstr("3.0 MiB  why"));
  EXPECT_THAT(text, HasSubstr("5.00 GiB  because"));
  EXPECT_THAT(text, HasSubstr("sum"));
  // The host's memory is not included in the total of the device.
  const std::string both =
      to_string(rows, {{"checkpoint", std::int64_t{7} << 30, "two buffers"}});
  EXPECT_THAT(both, ::testing::StartsWith(text));
  EXPECT_THAT(both, HasSubstr("on the host"));
  EXPECT_THAT(both, HasSubstr("7.00 GiB  two buffers"));
}

}  // namespace
}  // namespace flatshard::testing
