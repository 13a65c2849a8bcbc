#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/data/packing/packing.h"
#include "flatshard/data/text_codec.h"
#include "flatshard/data/token_source.h"
#include "flatshard/format/manifest.h"
#include "flatshard/models/llama.h"
#include "flatshard/models/lora_config.h"
#include "flatshard/train/config/run_config.h"

// The results of a run, found by any of the paths that a user has of it.
namespace flatshard {

inline constexpr const char* kHfConfig = "config.json";
inline constexpr const char* kGenerationConfig = "generation_config.json";

/// Returns the folder of checkpoints of `path`: the folder of the run whose
/// output_dir it is, else `path` itself.
std::filesystem::path checkpoints_of(const std::filesystem::path& path);

/// Returns the step-N folder that `path` means: itself, or one of the
/// checkpoints of a run's output_dir or of a folder of checkpoints.
/// @param step  -1: the latest.
/// @throws Error{io} if there is none; Error{config} for a step if the path is
/// a single checkpoint.
std::filesystem::path find_checkpoint(
    const std::filesystem::path& path,
    std::int64_t step = -1);

/// Returns the config that a training run left in its checkpoint.
/// @throws Error{format} if it is not a checkpoint of a training run.
Config checkpoint_config(
    const std::filesystem::path& folder,
    const Manifest& manifest);

/// Returns the dataset folder with the tokenizer of the run: the first of
/// data.train; empty if all are random tokens.
std::string tokenizer_corpus(const std::vector<data::SourceChoice>& train);

/// Returns a weight or buffer of a checkpoint as it is stored, unsharded,
/// checked by its digests.
/// @param name  the name of the parameter or buffer.
at::Tensor read_weight(
    const std::filesystem::path& folder,
    const Manifest& manifest,
    const std::string& name,
    int num_threads);

/// A model with its weights: of a finished run, an interrupted one (its latest
/// checkpoint), a checkpoint, or a Hugging Face folder.
struct StoredModel {
  models::ModelConfig shape;
  std::string what;        ///< source of the weights, for messages
  bool is_latest = false;  ///< a checkpoint that the path did not name
  at::ScalarType compute = at::kFloat;  ///< in which it computed
  /// Fills `out` (any float dtype and device) with a parameter or a router's
  /// bias, by its name.
  std::function<void(const std::string& name, const at::Tensor& out)> read;
  /// Adapters that `read` has in addition to the weights; not enabled: none.
  models::LoraConfig lora;
  std::string corpus;  ///< dataset that provides its tokenizer; may be empty
  /// How its documents were packed into sequences.
  data::Packing packing = data::Packing::stream;
  std::int64_t seq_len = 0;  ///< training.seq_len; 0: a Hugging Face folder
  std::filesystem::path hf_folder;  ///< empty: none

  /// Sets `compute` to the value of --dtype; "auto": it stays.
  /// @throws Error{config} for others than float32 and bfloat16.
  void use_dtype(const std::string& dtype);
};

/// @param step  of a checkpoint; -1: the finished run's weights, or the latest.
/// @throws Error{io} naming --run and the kinds of paths that it accepts.
StoredModel open_model(const std::filesystem::path& path, std::int64_t step);

/// Returns the model with its unsharded weights on a device.
models::Llama load_model(const StoredModel& stored, at::Device device);

/// Returns the tokenizer of a Hugging Face folder. It starts texts as
/// AutoTokenizer does. @throws Error{config} if it has no tokenizer.json.
std::unique_ptr<data::TextCodec> open_hf_codec(
    const std::filesystem::path& folder,
    const data::CodecOptions& options);

}  // namespace flatshard
