#pragma once

#include <string>
#include <string_view>

namespace flatshard::models {

// Our parameter names are Hugging Face's, but for the final norm: it belongs
// to the head module (one unit), so it is `lm_head.norm.weight` here and
// `model.norm.weight` there.

/// Hugging Face's name of one of our Llama parameters.
std::string to_hf_name(std::string_view name);

/// Our name of one of Hugging Face's Llama parameters.
std::string from_hf_name(std::string_view name);

}  // namespace flatshard::models
