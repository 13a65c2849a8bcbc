#include "flatshard/train/config/training_keys.h"

#include <algorithm>
#include <filesystem>

#include "flatshard/core/error.h"
#include "flatshard/train/config/rows.h"

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

const ConfigKey kTrainingKeys[] = {
    KEY(run.output_dir,
        "folder for config.toml, metrics.jsonl and weights, of one run at a "
        "time",
        .is_path = true),
    KEY(run.seed,
        "of the weights, the data order and dropout; the same seed gives the "
        "same run on any number of ranks"),
    KEY(run.save_weights,
        "write model.safetensors when the run ends; off for benchmarks"),

    KEY(data.train,
        "corpus folder made by 'flatshard data prepare', or \"random\" for "
        "random tokens (benchmarks); or a mixture: [{ path = \"a\", weight = "
        "0.7 }, { path = \"b\", weight = 0.3 }], whose weights are shares of "
        "the sequences"),
    KEY(data.validation,
        "corpus folder whose validation split is used, or a mixture; empty: "
        "that of data.train",
        .used_if = {kValidates}),

    KEY(data.packing,
        "stream: samples are cut from one stream of tokens; documents: samples "
        "are filled with whole documents, which attention keeps apart and "
        "whose positions begin at 0"),
    KEY(data.documents_per_sample,
        "the most documents of one sample; memory and graphs have room for so "
        "many; -1: training.seq_len / 64, at least 16",
        .range = {.min = 1, .max = kMaxTokens, .or_minus_one = true},
        .used_if =
            {{"data.packing",
              WHEN(c.data.packing == data::Packing::documents),
              "data.packing = \"documents\""}}),

    KEY(training.steps, "optimizer steps of the run", .range = {1, kMaxSteps}),
    KEY(training.seq_len, "tokens per sequence", .range = {1, kMaxTokens}),
    KEY(training.local_batch_size,
        "sequences per microbatch and rank",
        .range = {1, 1 << 20}),
    KEY(training.global_batch_size,
        "sequences per step over all ranks; gradients are accumulated over "
        "global_batch_size / (local_batch_size * ranks) microbatches; -1: one "
        "microbatch, or as in the checkpoint that the run resumes from",
        .range = {.min = 1, .max = kMaxBatch, .or_minus_one = true}),
    KEY(training.max_norm,
        "gradients are scaled down to this global 2-norm; 0: no clipping"),
    KEY(training.on_nonfinite,
        "when a gradient is NaN or infinite: stop, naming it (looked at in "
        "logged steps), skip the update, or rewind to the last checkpoint and "
        "leave that data out",
        .conflicts =
            {{{"checkpoint.interval"},
              WHEN(
                  c.training.on_nonfinite == OnNonfinite::rewind &&
                  c.checkpoint.interval == 0),
              "a rewind goes back to a checkpoint, and there are none; set the "
              "interval to 1 or more"}}),

    KEY(validation.freq,
        "steps between validations; 0: never",
        .range = {.max = kMaxSteps}),
    KEY(validation.sequences,
        "sequences of training.seq_len tokens per validation, the first ones "
        "of the split; -1: the whole split",
        .range = {-1, kMaxSteps},
        .used_if = {kValidates}),

    KEY(checkpoint.interval,
        "steps between checkpoints, from which `--resume` continues; one more "
        "after the last step; 0: none",
        .range = {.max = kMaxSteps}),
    KEY(checkpoint.keep_latest_k,
        "older checkpoints are removed when a new one is whole; 0: keep all",
        .range = {.max = kMaxSteps},
        .used_if = {kSaves}),
    KEY(checkpoint.async,
        "write in parallel with training; off: training waits for the disk",
        .used_if = {kSaves}),
    KEY(checkpoint.folder,
        "where checkpoints are, below run.output_dir",
        .is_path = true),
    KEY(checkpoint.load_step,
        "the step to resume from; -1: the latest with --resume, else none",
        .range = {-1, kMaxSteps}),
    KEY(checkpoint.exclude,
        "parts that are not loaded from a checkpoint or from model.init_from: "
        "shell patterns of parameter names, `optimizer`, `loader`, with commas "
        "between them"),
    KEY(checkpoint.export_hf_at_end,
        "write the last checkpoint as a Hugging Face folder, "
        "<run.output_dir>/hf",
        .used_if = {kSaves}),

    KEY(metrics.log_freq, "steps between log lines", .range = {1, kMaxSteps}),
    KEY(metrics.tensorboard,
        "also write what is measured as TensorBoard event files, to "
        "<run.output_dir>/tensorboard"),
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

void check_training(const Config& config) {
  check_checkpoint_folder(config);
  FLATSHARD_CHECK(
      !config.data.train.empty(),
      config,
      "data.train is missing: give a corpus folder (made by 'flatshard data "
      "prepare') or \"random\"");
  FLATSHARD_CHECK(
      !config.run.output_dir.empty(),
      config,
      "run.output_dir is empty: give a folder");
  FLATSHARD_CHECK(
      config.validation.sequences != 0,
      config,
      "validation.sequences expected -1 (the whole split) or at least 1, got "
      "0; validation.freq = 0 is a run without validation");
}

}  // namespace

KeyTable training_keys() {
  return {kTrainingKeys, check_training};
}

}  // namespace flatshard::config
