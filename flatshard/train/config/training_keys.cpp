#include "flatshard/train/config/training_keys.h"

#include <algorithm>
#include <filesystem>

#include "flatshard/core/error.h"
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

const ConfigKey kTrainingKeys[] = {
    KEY(run.output_dir,
        "Output directory of the run, for config.toml, metrics.jsonl, "
        "checkpoints and weights. Used by one run at a time.",
        .is_path = true),
    KEY(run.seed,
        "Random seed for weight initialization, data order and dropout. The "
        "same seed gives the same run on any number of ranks."),
    KEY(run.save_weights,
        "Write model.safetensors when the run ends. Turn it off for "
        "benchmarks."),

    KEY(data.train,
        "Dataset directory created by 'flatshard data prepare', or \"random\" "
        "for random tokens (benchmarks). A mixture is a list such as [{ path = "
        "\"a\", weight = 0.7 }, { path = \"b\", weight = 0.3 }], with weights "
        "as fractions of the sequences."),
    KEY(data.validation,
        "Dataset directory whose validation split is used, or a mixture. If "
        "empty, the validation split of data.train is used.",
        .used_if = {kValidates}),

    KEY(data.packing,
        "Packing of samples. stream: split one continuous stream of tokens "
        "into samples. documents: fill each sample with complete documents; "
        "attention does not cross documents, and positions restart at 0 in "
        "each."),
    KEY(data.documents_per_sample,
        "Maximum number of documents packed into one sample. Buffers and CUDA "
        "graphs are sized for it. -1: training.seq_len / 64, but at least 16.",
        .range = {.min = 1, .max = kMaxTokens, .or_minus_one = true},
        .used_if =
            {{"data.packing",
              WHEN(c.data.packing == data::Packing::documents),
              "data.packing = \"documents\""}}),

    KEY(training.steps, "Number of optimizer steps.", .range = {1, kMaxSteps}),
    KEY(training.seq_len,
        "Sequence length in tokens.",
        .range = {1, kMaxTokens}),
    KEY(training.local_batch_size,
        "Number of sequences per microbatch and rank.",
        .range = {1, 1 << 20}),
    KEY(training.global_batch_size,
        "Number of sequences per optimizer step over all ranks. Gradients are "
        "accumulated over global_batch_size / (local_batch_size * ranks) "
        "microbatches. -1: one microbatch, or the value stored in the "
        "checkpoint that the run resumes from.",
        .range = {.min = 1, .max = kMaxBatch, .or_minus_one = true}),
    KEY(training.max_norm,
        "Maximum global 2-norm of the gradients. Larger gradients are scaled "
        "down to it. 0 disables clipping."),
    KEY(training.on_nonfinite,
        "Action on a NaN or infinite gradient: stop and report the parameter "
        "(checked on logged steps), skip the update, or rewind to the last "
        "checkpoint and skip the data of that step.",
        .conflicts =
            {{{"checkpoint.interval"},
              WHEN(
                  c.training.on_nonfinite == OnNonfinite::rewind &&
                  c.checkpoint.interval == 0),
              "a rewind requires checkpoints; set the interval to 1 or more"}}),

    KEY(validation.freq,
        "Validate every N steps. 0 disables validation.",
        .range = {.max = kMaxSteps}),
    KEY(validation.sequences,
        "Number of sequences of training.seq_len tokens per validation, from "
        "the start of the split. -1: the full split.",
        .range = {-1, kMaxSteps},
        .used_if = {kValidates}),

    KEY(checkpoint.interval,
        "Save a checkpoint every N steps, and after the last step. `--resume` "
        "continues from the latest one. 0 disables checkpoints.",
        .range = {.max = kMaxSteps}),
    KEY(checkpoint.keep_latest_k,
        "Number of most recent checkpoints to keep. Older ones are removed "
        "once a new one is complete. 0 keeps all.",
        .range = {.max = kMaxSteps},
        .used_if = {kSaves}),
    KEY(checkpoint.async,
        "Write checkpoints in parallel with training. If false, training waits "
        "for the disk.",
        .used_if = {kSaves}),
    KEY(checkpoint.folder,
        "Directory for checkpoints, relative to run.output_dir.",
        .is_path = true),
    KEY(checkpoint.load_step,
        "Step to resume from. -1: the latest checkpoint with --resume, "
        "otherwise none.",
        .range = {-1, kMaxSteps}),
    KEY(checkpoint.exclude,
        "Skip these parts when loading from a checkpoint or from "
        "model.init_from: a comma-separated list of shell patterns of "
        "parameter names, `optimizer` and `loader`."),
    KEY(checkpoint.export_hf_at_end,
        "Export the last checkpoint to a Hugging Face model directory, "
        "<run.output_dir>/hf.",
        .used_if = {kSaves}),

    KEY(metrics.log_freq,
        "Log metrics every N steps.",
        .range = {1, kMaxSteps}),
    KEY(metrics.tensorboard,
        "Also write metrics as TensorBoard event files, to "
        "<run.output_dir>/tensorboard."),
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
