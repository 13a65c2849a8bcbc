#pragma once

#include "flatshard/mesh/token_part.h"
#include "flatshard/models/lora.h"
#include "flatshard/runtime/runtime.h"
#include "flatshard/train/config/lora_keys.h"

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

// A run that trains adapters: [lora].
namespace flatshard {

/// Returns the adapters that [lora] describes; not enabled without lora.rank.
models::LoraConfig lora_config(const config::Lora& keys);

/// The adapters of a run in addition to their parameters.
struct RunLora {
  models::LoraConfig config;
  std::size_t num_modules = 0;  ///< with an adapter
  /// Null without lora.dropout.
  std::shared_ptr<const nn::SampleDropout> dropout;

  /// Returns the numbers of the next forward's samples, int64
  /// [local_batch_size]; undefined without dropout. See nn::SampleDropout.
  at::Tensor samples() const {
    return dropout ? dropout->samples() : at::Tensor();
  }
  /// Forwards drop nothing from here to the next step.
  void begin_evaluation() const;
};

/// Returns the number of parameters that a run trains: all, or only the
/// parameters of its adapters.
std::int64_t num_trainable_parameters(
    const config::Lora& lora,
    const models::ModelConfig& model);

/// Floating-point operations of the matmuls per token: 6 for each trained
/// parameter, 4 for each frozen parameter.
double matmul_flops_per_token(
    const config::Lora& lora,
    const models::ModelConfig& model);
/// models::flops_per_token of a run: the same plus FLOPs of attention.
double trained_flops_per_token(
    const config::Lora& lora,
    const models::ModelConfig& model,
    std::int64_t seq_len);

/// The numbers that dropout of adapters depends on.
struct AdapterDropout {
  std::uint64_t seed = 0;
  std::int64_t local_batch_size = 1;
  TokenPart part;  ///< of this rank
};

/// Gives the model of a run its adapters. It has no memory yet.
/// @throws Error{config} naming the key.
RunLora add_adapters(
    models::Llama& model,
    const models::LoraConfig& adapters,
    const AdapterDropout& dropout,
    at::Device device);

/// Returns the groups of a run with adapters that are not in checkpoints.
std::vector<ParamGroup*> frozen_groups(const Runtime& runtime);

/// Frees the memory of frozen groups except for FP8. Collective.
void keep_float8_alone(const std::vector<ParamGroup*>& frozen);

/// Starts from the adapter in `folder`, lora.init_from_adapter. Each rank reads
/// what it owns. Blocks.
/// @throws Error{io, format, config} naming the key.
void load_adapter(
    const std::filesystem::path& folder,
    const models::LoraConfig& lora,
    const models::ModelConfig& model,
    const std::vector<ParamGroup*>& adapters);

/// Returns the adapter_config.json of a run.
/// @param base  model.init_from.
std::string peft_config_text(
    const models::LoraConfig& lora,
    const std::string& base,
    const models::ModelConfig& model);

/// Writes adapter_model.safetensors and adapter_config.json into an existing
/// `folder`. Collective: rank 0 writes.
/// @param peft_config  see peft_config_text.
void save_adapter(
    const std::string& peft_config,
    const models::ModelConfig& model,
    const std::vector<ParamGroup*>& adapters,
    const std::filesystem::path& folder);

}  // namespace flatshard
