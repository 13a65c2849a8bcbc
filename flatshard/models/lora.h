#pragma once

#include "flatshard/models/llama.h"
#include "flatshard/models/lora_config.h"
#include "flatshard/nn/lora/sample_dropout.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// LoRA of a model of any family: the linear layers that have an adapter. A
// layer is named as its module in transformers. Several of our layers may be
// one module there (Phi-3's qkv_proj). Then their adapters share A, and each B
// is a slice of rows of the module's B.
// Source: Hu et al., arXiv:2106.09685.
namespace flatshard::models {

/// Gives a model without memory its adapters and freezes its other parameters.
///
/// @param dropout  of the adapters' inputs; null: none.
/// @return the names of the modules with an adapter, as transformers has them.
/// @throws Error{config} naming the key: for a target that matches no layer,
///   and for experts, embeddings and heads (not supported).
std::vector<std::string> add_lora(
    LlamaImpl& model,
    const LoraConfig& lora,
    const std::shared_ptr<const nn::SampleDropout>& dropout = nullptr);

/// The parameters of a layer with an adapter, by their main names.
struct AdaptedLayer {
  std::string weight;
  std::string a, b;
};
/// Returns the layers that add_lora gave an adapter.
std::vector<AdaptedLayer> adapted_layers(LlamaImpl& model);

/// Returns whether a parameter of a model, by its name there, belongs to an
/// adapter.
bool is_adapter_parameter(std::string_view name);

/// Counts the parameters of a model's adapters, each once.
std::int64_t num_adapter_parameters(
    const ModelConfig& config,
    const LoraConfig& lora);

}  // namespace flatshard::models
