// FP8 weights load from files as others do; planes equal one rank's planes.
#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/init_weights.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/error.h"
#include "flatshard/format/checkpoint_folder.h"
#include "tests/group/float8_groups.h"
#include "tests/support/message_of.h"
#include "tests/support/temp_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<GroupCase>& cases() {
  static const std::vector<GroupCase> all{
      {"zero3", {1}},
      {"zero3", {2}},
      {"zero1", {3}},
      {"zero3", {5}},
      {"hfsdp", {2, 2}}};
  return all;
}

std::vector<StoredEntry> same(
    const std::string& name,
    const std::vector<std::int64_t>& shape) {
  return {{name, shape}};
}

// The planes of the same weights, where loading replaces other initial values.
void expect_planes_of_one_rank(
    const std::function<void(ParamGroup&, const std::shared_ptr<Mesh>&)>&
        load) {
  std::map<std::string, Bytes> want;
  run_ranks(1, [&](RankContext& context) {
    for (const Float8Format& format : formats()) {
      const auto group = fp8_group({"zero3", {1}}, context.mesh(), format);
      want[name_of(format) + std::string(to_string(format.rounding))] =
          gathered(*group);
    }
  });
  std::mutex mutex;
  for (const GroupCase& c : cases()) {
    run_ranks(c.world(), [&](RankContext& context) {
      context.axes = c.axes();
      const auto mesh = context.mesh();
      for (const Float8Format& format : formats()) {
        if (format.recipe == float8::Recipe::blockwise) {
          continue;  // its matrices are others
        }
        const auto group = fp8_group(c, mesh, format);
        group->weights().main().local().fill_(7);
        group->weights().adopt_foreign_writes();
        gathered(*group);
        load(*group, mesh);
        const Bytes got = gathered(*group);
        std::ostringstream what;
        what << name_of(format) << " " << c;
        const std::lock_guard lock(mutex);
        expect_same(
            got,
            want.at(name_of(format) + std::string(to_string(format.rounding))),
            what.str());
      }
    });
  }
}

TEST(Float8Files, InitFromGivesThePlanesOfOneRank) {
  const TempFolder folder;
  run_ranks(1, [&](RankContext& context) {
    const auto group = fp8_group({"zero3", {1}}, context.mesh(), {});
    save_weights({group.get()}, folder / "model.safetensors");
  });
  expect_planes_of_one_rank(
      [&](ParamGroup& group, const std::shared_ptr<Mesh>&) {
        init_weights(folder.path(), {&group}, {.entries_of = same});
      });
}

// The checkpoint was written with another recipe and number of ranks.
TEST(Float8Files, F8_ACheckpointGivesThePlanesOfOneRank) {
  const TempFolder folder;
  run_ranks(2, [&](RankContext& context) {
    const auto mesh = context.mesh();
    const auto group = fp8_group(
        {"zero3", {2}},
        mesh,
        {.recipe = float8::Recipe::mxfp8, .stored_columns = true});
    Checkpointer checkpointer(
        mesh,
        {group.get()},
        nullptr,
        {.folder = folder.path()});
    checkpointer.save(1, {});
    checkpointer.wait();
    for (const SaveResult& result : checkpointer.take_results()) {
      EXPECT_FALSE(result.error.has_value());
    }
  });
  expect_planes_of_one_rank(
      [&](ParamGroup& group, const std::shared_ptr<Mesh>&) {
        load_checkpoint(step_folder(folder.path(), 1), {&group}, nullptr);
      });
}

TEST(Float8Files, F6_AMissingWeightIsNamed) {
  const TempFolder folder;
  run_ranks(1, [&](RankContext& context) {
    ParamGroup part(
        {.name = "block",
         .parameters =
             {{.names = {"wide"}, .shape = {32, 128}},
              {.names = {"tall"}, .shape = {160, 32}}},
         .mesh = context.mesh(),
         .strategy = Strategy::named("zero3", 1)},
        {},
        Initializer(kGroupSeed));
    save_weights({&part}, folder / "model.safetensors");
    Checkpointer checkpointer(
        context.mesh(),
        {&part},
        nullptr,
        {.folder = folder.path()});
    checkpointer.save(1, {});
    checkpointer.wait();
    const auto group = fp8_group({"zero3", {1}}, context.mesh(), {});
    EXPECT_THAT(
        message_of([&] {
          init_weights(folder.path(), {group.get()}, {.entries_of = same});
        }),
        HasSubstr("square"));
    EXPECT_THAT(
        message_of([&] {
          load_checkpoint(
              step_folder(folder.path(), 1),
              {group.get()},
              nullptr);
        }),
        HasSubstr("square"));
  });
}

}  // namespace
}  // namespace flatshard::testing
