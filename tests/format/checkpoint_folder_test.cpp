#include "flatshard/format/checkpoint_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "flatshard/core/error.h"
#include "flatshard/format/manifest.h"
#include "tests/support/temp_folder.h"

namespace flatshard {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class CheckpointFolder : public ::testing::Test {
 protected:
  /// Writes a partial checkpoint with `text` as its manifest.
  void write_partial(std::int64_t step, const std::string& text) {
    const fs::path partial = partial_folder(folder(), step, "id");
    fs::create_directories(partial);
    std::ofstream(partial / kManifestName) << text;
  }
  void publish(std::int64_t step, const std::string& text = "{}") {
    write_partial(step, text);
    publish_checkpoint(folder(), step, "id");
  }
  std::string content(std::int64_t step) {
    std::ifstream file(step_folder(folder(), step) / kManifestName);
    std::string text;
    std::getline(file, text);
    return text;
  }
  std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder())) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  const fs::path& folder() const { return temp_.path(); }

  TempFolder temp_;
};

TEST_F(CheckpointFolder, HasNothingAtFirst) {
  EXPECT_THAT(list_checkpoints(folder()), IsEmpty());
  EXPECT_THAT(list_checkpoints(folder() / "missing"), IsEmpty());
  EXPECT_FALSE(latest_checkpoint(folder()).has_value());
}

TEST_F(CheckpointFolder, PublishMakesItLatest) {
  publish(10);
  publish(9);  // a run that went back
  EXPECT_THAT(names(), ElementsAre("latest", "step-10", "step-9"));
  EXPECT_THAT(list_checkpoints(folder()), ElementsAre(9, 10));
  EXPECT_EQ(latest_checkpoint(folder()), 9);
}

TEST_F(CheckpointFolder, HalfWrittenOnesDoNotCount) {
  publish(10);
  write_partial(20, "{}");
  fs::create_directories(folder() / "step-30");  // no manifest
  fs::create_directories(folder() / "step-x");
  fs::create_directories(folder() / "step-1e3");
  EXPECT_THAT(list_checkpoints(folder()), ElementsAre(10));
  EXPECT_EQ(latest_checkpoint(folder()), 10);
}

TEST_F(CheckpointFolder, LatestThatIsGoneIsTheLastOne) {
  publish(10);
  publish(20);
  fs::remove_all(step_folder(folder(), 20));
  EXPECT_EQ(latest_checkpoint(folder()), 10);
  std::ofstream(folder() / "latest") << "rubbish\n";
  EXPECT_EQ(latest_checkpoint(folder()), 10);
}

TEST_F(CheckpointFolder, AStepIsReplacedWhole) {
  publish(10, "old");
  std::ofstream(step_folder(folder(), 10) / "only-in-the-old-one") << "x";
  publish(10, "new");
  EXPECT_EQ(content(10), "new");
  EXPECT_FALSE(fs::exists(step_folder(folder(), 10) / "only-in-the-old-one"));
  EXPECT_THAT(names(), ElementsAre("latest", "step-10"));
}

TEST_F(CheckpointFolder, PruneKeepsTheLastAndTheLatest) {
  for (const std::int64_t step : {10, 20, 30, 5}) {
    publish(step);
  }
  EXPECT_THAT(prune_checkpoints(folder(), 2), ElementsAre(10));
  EXPECT_THAT(names(), ElementsAre("latest", "step-20", "step-30", "step-5"));
  EXPECT_THAT(prune_checkpoints(folder(), 4), IsEmpty());
}

TEST_F(CheckpointFolder, LeftoversGo) {
  publish(10);
  write_partial(20, "{}");
  fs::create_directories(folder() / "step-5.removed-1");
  fs::create_directories(folder() / "mine");
  remove_leftovers(folder());
  EXPECT_THAT(names(), ElementsAre("latest", "mine", "step-10"));
}

TEST_F(CheckpointFolder, AFolderThatCannotBeRenamedIsAnError) {
  try {
    publish_checkpoint(folder(), 10, "id");  // nothing was written
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_THAT(error.message(), ::testing::HasSubstr("step-10.partial-id"));
  }
}

}  // namespace
}  // namespace flatshard
