#include "flatshard/train/config/training_keys.h"

#include <algorithm>
#include <filesystem>

#include "flatshard/core/error.h"
#include "flatshard/core/http.h"
#include "flatshard/train/config/key_rows.h"

namespace flatshard::config {
namespace {

constexpr UsedIf kValidates{
    "validation.freq",
    WHEN(c.validation.freq > 0),
    "runs that validate; set validation.freq to 1 or more"};
constexpr UsedIf kSaves{
    "checkpoint.interval",
    WHEN(c.checkpoint.interval > 0),
    "runs that write checkpoints; set checkpoint.interval to 1 or more"};

constexpr UsedIf kSends{
    "weights.send",
    WHEN(!c.weights.send.empty()),
    "runs that send their weights; set weights.send to the URL of an engine"};

const ConfigKey kTrainingKeys[] = {
#define KEY(...) KEY_ROW(run, __VA_ARGS__)
#include "flatshard/train/config/sections/run.def"
#define KEY(...) KEY_ROW(data, __VA_ARGS__)
#include "flatshard/train/config/sections/data.def"
#define KEY(...) KEY_ROW(training, __VA_ARGS__)
#include "flatshard/train/config/sections/training.def"
#define KEY(...) KEY_ROW(validation, __VA_ARGS__)
#include "flatshard/train/config/sections/validation.def"
#define KEY(...) KEY_ROW(checkpoint, __VA_ARGS__)
#include "flatshard/train/config/sections/checkpoint.def"
#define KEY(...) KEY_ROW(weights, __VA_ARGS__)
#include "flatshard/train/config/sections/weights.def"
#define KEY(...) KEY_ROW(metrics, __VA_ARGS__)
#include "flatshard/train/config/sections/metrics.def"
};

void check_checkpoint_folder(const Config& config) {
  const std::string& text = config.checkpoint.folder;
  const std::filesystem::path folder(text);
  const bool leaves = std::any_of(
      folder.begin(),
      folder.end(),
      [](const std::filesystem::path& part) {
        return part == ".." || part == ".";
      });
  FLATSHARD_CHECK(
      !text.empty() && !leaves,
      config,
      "checkpoint.folder expected a folder below run.output_dir, or an "
      "absolute one, got \"{}\"",
      text);
}

void check_weights(const Config& config) {
  if (config.weights.send.empty()) {
    return;
  }
  parse_http_url(config.weights.send, "weights.send");
  FLATSHARD_CHECK(
      config.weights.timeout_s < config.comm.timeout_s,
      config,
      "weights.timeout_s = {} expected less than comm.timeout_s = {}, because "
      "the other ranks wait for rank 0 while it sends; lower it or raise "
      "comm.timeout_s",
      config.weights.timeout_s,
      config.comm.timeout_s);
}

void check_training(const Config& config) {
  check_checkpoint_folder(config);
  check_weights(config);
  FLATSHARD_CHECK(
      !config.data.train.empty(),
      config,
      "data.train is missing: set it to a dataset directory (created by "
      "'flatshard data prepare') or \"random");
  FLATSHARD_CHECK(
      !config.run.output_dir.empty(),
      config,
      "run.output_dir is empty: give a folder");
  FLATSHARD_CHECK(
      config.validation.sequences != 0,
      config,
      "validation.sequences expected -1 (the full split) or at least 1, got "
      "0; validation.freq = 0 disables validation");
}

}  // namespace

KeyTable training_keys() {
  return {kTrainingKeys, check_training};
}

}  // namespace flatshard::config
