// Optimizer states in one format are loaded in another, on any ranks.
#include "flatshard/checkpoint/checkpointer.h"
#include "flatshard/checkpoint/load.h"
#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/format/checkpoint_folder.h"
#include "tests/checkpoint/some_groups.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

std::vector<SomeGroup> specs() {
  const auto normal = InitSpec::normal(0, 1);
  return {
      {.parameters =
           {{.names = {"norm"}, .shape = {40}, .init = normal},
            {.names = {"rows", "tied"}, .shape = {19, 512}, .init = normal},
            {.names = {"odd"}, .shape = {71, 67}, .init = normal}}},
      {.parameters = {{.names = {"second"}, .shape = {4100}, .init = normal}}}};
}

/// The tensors of a checkpoint, by "role/name", flattened.
class Values {
 public:
  /// Adds what this rank has. Called by ranks that are threads.
  void add(const SomeGroups& model) {
    const std::lock_guard lock(mutex_);
    for (const OwnedBox& each :
         owned_boxes(model.groups, model.optimizer.get())) {
      const std::string key = each.role + "/" + each.names.front();
      if (each.values.numel() == 0) {
        continue;
      }
      if (tensors_.count(key) == 0) {
        std::int64_t numel = 1;
        for (const std::int64_t size : each.shape) {
          numel *= size;
        }
        tensors_[key] = at::zeros({numel}, each.values.options());
      }
      for_each_run(
          FlatRuns(each.shape, each.box),
          0,
          each.values.numel(),
          [&](std::int64_t first, std::int64_t at, std::int64_t n) {
            tensors_[key]
                .narrow(0, first, n)
                .copy_(each.values.narrow(0, at, n));
          });
    }
  }

  void expect_equal(const Values& other) const {
    ASSERT_EQ(tensors_.size(), other.tensors_.size());
    for (const auto& [key, tensor] : tensors_) {
      EXPECT_TRUE(tensor.equal(other.tensors_.at(key))) << key;
    }
  }
  const at::Tensor& at(const std::string& key) const {
    return tensors_.at(key);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
};

void train(const SomeGroups& model) {
  for (int step = 0; step < 3; ++step) {
    for (ParamGroup* group : model.groups) {
      const FlatLayout& layout = group->layout();
      const at::Tensor flat = at::zeros({layout.numel()});
      for (std::int64_t i = 0; i < layout.num_tensors(); ++i) {
        const std::int64_t n = layout.tensor_numel(i);
        const at::Tensor x = at::arange(n, at::kFloat);
        flat.narrow(0, layout.tensor_offset(i), n)
            .copy_((x * (i + 1)).sin() * (x * 0.01 - step).cos().pow(3));
      }
      group->gradients().reduce(flat, group->plan_reduction(true, true));
    }
    model.optimizer->step(0.01);
    model.optimizer->zero_grad();
  }
}

/// Loads step `from` of the folder (0: trains instead), saves step `to`, and
/// returns all values.
void run(
    const TempFolder& folder,
    Sharding sharding,
    StateFormat format,
    int from,
    int to,
    Values& values) {
  sharding.states = format;
  run_ranks(sharding.world(), [&](RankContext& context) {
    const auto mesh = context.mesh(sharding.axes);
    const SomeGroups model(specs(), sharding, mesh);
    Checkpointer checkpointer(
        mesh,
        model.groups,
        model.optimizer.get(),
        {.folder = folder.path()});
    if (from == 0) {
      train(model);
    } else {
      load_checkpoint(
          step_folder(folder.path(), from),
          model.groups,
          model.optimizer.get());
      EXPECT_EQ(model.optimizer->num_steps(), 3);
    }
    checkpointer.save(to, {});
    checkpointer.wait();
    for (const SaveResult& result : checkpointer.take_results()) {
      EXPECT_FALSE(result.error.has_value()) << result.error->what();
    }
    values.add(model);
  });
}

TEST(StateFormats, ACheckpointIsLoadedInAnyFormatOnAnyRanks) {
  const TempFolder folder;
  const Sharding one;
  const Sharding two{"zero3", {{"dp", 2}}};
  const Sharding rows{"zero2", {{"dp", 3}}, Granularity::row()};
  const Sharding replicas{"hsdp", {{"outer", 2}, {"dp", 2}}};
  Values trained;
  run(folder, two, StateFormat::int8, 0, 1, trained);
  EXPECT_EQ(trained.at("exp_avg/rows").scalar_type(), at::kChar);
  EXPECT_EQ(trained.at("exp_avg_sq/odd").scalar_type(), at::kByte);
  EXPECT_EQ(trained.at("exp_avg/norm").scalar_type(), at::kFloat);
  EXPECT_EQ(trained.at("exp_avg.scale/second").numel(), 17);

  // The same format on other ranks.
  Values same;
  run(folder, rows, StateFormat::int8, 1, 2, same);
  same.expect_equal(trained);

  // To float32 exactly, and back on replicas.
  Values floats;
  run(folder,
      Sharding{"zero3", {{"dp", 5}}},
      StateFormat::float32,
      2,
      3,
      floats);
  EXPECT_EQ(floats.at("exp_avg/rows").scalar_type(), at::kFloat);
  Values back;
  run(folder, replicas, StateFormat::int8, 3, 4, back);
  back.expect_equal(trained);

  // Through bfloat16 the codes change by its rounding, and weights do not.
  Values halves;
  run(folder, two, StateFormat::bfloat16, 4, 5, halves);
  EXPECT_TRUE(halves.at("exp_avg_sq/odd")
                  .equal(floats.at("exp_avg_sq/odd").to(at::kBFloat16)));
  Values last;
  run(folder, one, StateFormat::int8, 5, 6, last);
  EXPECT_TRUE(last.at("weight/rows").equal(trained.at("weight/rows")));
  EXPECT_LE(
      (last.at("exp_avg/odd").to(at::kInt) -
       trained.at("exp_avg/odd").to(at::kInt))
          .abs()
          .max()
          .item<int>(),
      1);
}

// States in host memory are saved when the copies of the last step have arrived
// there, and loaded whatever the writer did.
TEST(StateFormats, OffloadedStatesAreSavedAndLoaded) {
  for (const StateFormat format : {StateFormat::float32, StateFormat::int8}) {
    const TempFolder folder;
    Sharding offloaded{"zero3", {{"dp", 2}}};
    offloaded.offloads_states = true;
    const Sharding on_device{"zero2", {{"dp", 2}}};
    Values want;
    run(folder, on_device, format, 0, 1, want);
    Values trained;
    run(folder, offloaded, format, 0, 2, trained);
    trained.expect_equal(want);
    for (const int from : {1, 2}) {
      Values loaded;
      run(folder, offloaded, format, from, 10 + from, loaded);
      loaded.expect_equal(want);
      Values back;
      run(folder, on_device, format, 10 + from, 20 + from, back);
      back.expect_equal(want);
    }
  }
}

TEST(StateFormats, ScalesThatAreMissingAreAnError) {
  const TempFolder folder;
  Values values;
  run(folder, {}, StateFormat::int8, 0, 1, values);
  const auto path = step_folder(folder.path(), 1);
  Manifest manifest = read_manifest(path);
  manifest.tensors.at("exp_avg.scale").erase("odd");
  std::filesystem::remove(path / kManifestName);
  write_file_atomic(path / kManifestName, to_json(manifest));
  try {
    run(folder, {}, StateFormat::float32, 1, 2, values);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("expected F32 scales of shape [19]"));
  }
}

}  // namespace
}  // namespace flatshard::testing
