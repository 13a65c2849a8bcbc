#pragma once

#include <string>
#include <string_view>
#include <vector>

// Names of config keys in other trainers.
namespace flatshard::config {

/// Returns a hint for a key name of Hugging Face's TrainingArguments,
/// torchtitan, axolotl, DeepSpeed or nanoGPT: "give optimizer.lr". Empty for
/// other names.
std::string hint_for_other_name(std::string_view name);

/// Returns all names that have a hint.
std::vector<std::string> other_names();

/// Returns the section here with the content of such a section: "run" for
/// torchtitan's "job". Empty for other names.
std::string_view section_for_other_name(std::string_view name);

}  // namespace flatshard::config
