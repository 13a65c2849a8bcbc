// Weights split by tensor and expert parallelism are initialized, saved,
// exported and loaded as the full tensors on any grid.
#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/format/checkpoint_folder.h"
#include "tests/checkpoint/grids.h"
#include "tests/support/message_of.h"
#include "tests/support/temp_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_checkpoint(
    const GridModel& model,
    const std::filesystem::path& folder) {
  Checkpointer checkpointer(
      model.mesh,
      model.groups.groups,
      model.groups.optimizer.get(),
      {.folder = folder});
  checkpointer.save(4, {});
  checkpointer.wait();
  for (const SaveResult& result : checkpointer.take_results()) {
    EXPECT_FALSE(result.error.has_value()) << result.error->what();
  }
}

TEST(Grids, G5_FirstValuesAreThoseOfTheWholeTensors) {
  const TempFolder folder;
  std::string expected;
  for (const Grid& grid : grids()) {
    const auto path = folder / "weights.safetensors";
    run_ranks(grid.world(), [&](RankContext& context) {
      const GridModel model(context, grid);
      for (const OwnedBox& owned : owned_boxes(model.groups.groups, nullptr)) {
        const at::Tensor whole = at::empty(owned.shape);
        Initializer(3).fill(
            whole,
            owned.names.front(),
            InitSpec::normal(0, 1),
            /*begin=*/0);
        at::Tensor part = whole;
        for (std::size_t d = 0; d < owned.box.start.size(); ++d) {
          part = part.narrow(
              static_cast<std::int64_t>(d),
              owned.box.start[d],
              owned.box.length[d]);
        }
        EXPECT_TRUE(
            owned.values.numel() == 0 || owned.values.equal(part.flatten()))
            << grid.to_string() << " " << owned.names.front();
      }
      save_weights(model.all(), path);
    });
    const std::string bytes = bytes_of(path);
    EXPECT_GT(bytes.size(), 1000u);
    if (expected.empty()) {
      expected = bytes;
    }
    EXPECT_TRUE(bytes == expected) << grid.to_string();
  }
}

// Names and values of a checkpoint do not depend on the grid.
TEST(Grids, G5_WhatOneGridWroteAnyOtherReads) {
  const Grid writer{.dp = 2, .tp = 2};
  const TempFolder folder;
  const TempFolder hf;
  run_ranks(writer.world(), [&](RankContext& context) {
    const GridModel model(context, writer);
    model.groups.fill();
    write_checkpoint(model, folder.path());
    save_weights(model.all(), hf / "model.safetensors");
  });
  const std::string exported = bytes_of(hf / "model.safetensors");
  for (const Grid& reader : grids()) {
    SCOPED_TRACE(reader.to_string());
    run_ranks(reader.world(), [&](RankContext& context) {
      const GridModel model(context, reader);
      model.groups.fill_with(-1);
      load_checkpoint(
          step_folder(folder.path(), 4),
          model.groups.groups,
          model.groups.optimizer.get());
      EXPECT_THAT(model.groups.wrong(), IsEmpty());
      save_weights(model.all(), folder / "again.safetensors");

      // The same weights from a Hugging Face folder.
      model.groups.fill_with(-1);
      init_weights(
          hf.path(),
          model.groups.groups,
          {.entries_of = [](const std::string& name,
                            const std::vector<std::int64_t>& shape) {
            return std::vector<StoredEntry>{{name, shape}};
          }});
      for (const OwnedBox& owned : owned_boxes(model.groups.groups, nullptr)) {
        EXPECT_TRUE(owned.values.equal(SomeGroups::expected(owned)))
            << owned.names.front();
      }
    });
    EXPECT_TRUE(bytes_of(folder / "again.safetensors") == exported);
    // And the way back: written by the reader, the bytes of a world of one.
    const TempFolder other;
    run_ranks(reader.world(), [&](RankContext& context) {
      const GridModel model(context, reader);
      model.groups.fill();
      write_checkpoint(model, other.path());
    });
    run_ranks(1, [&](RankContext& context) {
      const GridModel model(context, {});
      model.groups.fill_with(-1);
      load_checkpoint(
          step_folder(other.path(), 4),
          model.groups.groups,
          model.groups.optimizer.get());
      EXPECT_THAT(model.groups.wrong(), IsEmpty());
    });
  }
}

// An expert's entries are separate tensors of files, gate and up apart.
TEST(Grids, SeveralEntriesHoldAWeightThatIsCut) {
  const TempFolder hf;
  const StoredEntriesOf entries_of =
      [](const std::string& name, const std::vector<std::int64_t>& shape) {
        std::vector<StoredEntry> entries;
        if (name != "experts.gate_up") {
          return std::vector<StoredEntry>{{name, shape}};
        }
        for (std::int64_t e = 0; e < shape[0]; ++e) {
          for (const char* what : {"gate", "up"}) {
            entries.push_back(
                {fmt::format("experts.{}.{}", e, what),
                 {shape[1] / 2, shape[2]}});
          }
        }
        return entries;
      };
  run_ranks(4, [&](RankContext& context) {
    const GridModel model(context, {.ep = 2, .tp = 2});
    model.groups.fill();
    save_weights(model.all(), hf / "model.safetensors", {}, entries_of);
  });
  for (const Grid& reader : {Grid{.dp = 3}, Grid{.ep = 2, .tp = 2}}) {
    run_ranks(reader.world(), [&](RankContext& context) {
      const GridModel model(context, reader);
      init_weights(hf.path(), model.groups.groups, {.entries_of = entries_of});
      for (const OwnedBox& owned : owned_boxes(model.groups.groups, nullptr)) {
        EXPECT_TRUE(owned.values.equal(SomeGroups::expected(owned)))
            << owned.names.front();
      }
    });
  }
}

// tests/checkpoint/version_1: a release wrote it on two ranks when a piece was
// a run of the flattened tensor. Element i of a weight is i, of a bias 50 + i,
// and AdamW's states are 100 and 200 more. The border of the ranks is within a
// row of the weight.
TEST(Grids, ReadACheckpointOfVersion1) {
  const std::map<std::string, int> offset_of{
      {"weight", 0},
      {"exp_avg", 100},
      {"exp_avg_sq", 200}};
  for (const std::int64_t tp : {1, 3}) {
    run_ranks(static_cast<int>(2 * tp), [&](RankContext& context) {
      const auto mesh = context.mesh({{"dp", 2}, {"tp", tp}});
      // The weight [7, 3, 3] is split in its last dimension.
      const SomeGroups model(
          {{.parameters =
                {{.names = {"layer.weight"},
                  .shape = {7, 3, 3 / tp},
                  .placement = ParameterPlacement::cut_over(
                      *mesh,
                      {"tp"},
                      TensorSlice().cut(2, mesh->coordinate("tp"), tp)),
                  .init = InitSpec::zeros()}}},
           {.parameters =
                {{.names = {"layer.bias"},
                  .shape = {7},
                  .init = InitSpec::zeros()}}}},
          {},
          mesh);
      const LoadedCheckpoint loaded = load_checkpoint(
          FLATSHARD_TEST_VERSION_1,
          model.groups,
          model.optimizer.get());
      EXPECT_EQ(loaded.step, 4);
      EXPECT_EQ(loaded.state.at("note"), "version 1");
      EXPECT_EQ(model.optimizer->num_steps(), 9);
      EXPECT_EQ(model.optimizer->num_updates(0, 0), 7);
      for (const OwnedBox& owned :
           owned_boxes(model.groups, model.optimizer.get())) {
        if (owned.values.numel() == 0) {
          continue;
        }
        const int first = offset_of.at(owned.role) +
                          (owned.names.front() == "layer.bias" ? 50 : 0);
        for_each_run(
            FlatRuns(owned.shape, owned.box),
            0,
            owned.values.numel(),
            [&](std::int64_t element, std::int64_t at, std::int64_t n) {
              EXPECT_TRUE(owned.values.narrow(0, at, n).equal(
                  at::arange(first + element, first + element + n, at::kFloat)))
                  << owned.role << " of " << owned.names.front();
            });
      }
    });
  }
}

TEST(Grids, AShapeThatIsNotTheWholeTensorsIsNamed) {
  const TempFolder folder;
  run_ranks(2, [&](RankContext& context) {
    const GridModel model(context, {.tp = 2});
    write_checkpoint(model, folder.path());
  });
  run_ranks(1, [&](RankContext& context) {
    const auto mesh = context.mesh({{"dp", 1}, {"ep", 1}, {"tp", 1}});
    auto changed = specs(*mesh);
    changed[0].parameters[3].shape = {6, 4};  // half of o.weight
    const SomeGroups model(changed, {}, mesh);
    EXPECT_THAT(
        message_of([&] {
          load_checkpoint(
              step_folder(folder.path(), 4),
              model.groups,
              model.optimizer.get());
        }),
        HasSubstr("weight of o.weight: expected shape [6, 4], got [6, 8]"));
  });
}

}  // namespace
}  // namespace flatshard::testing
