#pragma once

#include "flatshard/core/stored_entry.h"
#include "flatshard/models/config.h"
#include "flatshard/models/lora_config.h"

#include <filesystem>
#include <string>
#include <vector>

// The folder of an adapter as peft reads and writes it.
namespace flatshard::models {

inline constexpr const char* kPeftWeights = "adapter_model.safetensors";
inline constexpr const char* kPeftConfig = "adapter_config.json";

/// Returns the tensors of adapter_model.safetensors for an adapter parameter:
/// an entire tensor, or rows of a B that several layers share.
StoredEntriesOf peft_entries_of(const ModelConfig& config);

/// Returns adapter_config.json.
/// @param modules  as add_lora returns them.
/// @param base     the folder of the base model; empty: null is written.
std::string to_peft_json(
    const LoraConfig& lora,
    const std::vector<std::string>& modules,
    const std::string& base);

/// Checks that the adapter of an adapter_config.json is one that `lora`
/// describes: its rank and scale, and nothing that adapters here do not have.
/// @throws Error{format, config} naming the file, its key and our key.
void check_peft_json(const std::filesystem::path& path, const LoraConfig& lora);

}  // namespace flatshard::models
