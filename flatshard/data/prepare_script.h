#pragma once

namespace flatshard::data {

/// The texts of python/flatshard/hf_encoder.py, hf_chat.py and
/// prepare_tokens.py, put here by CMake.
extern const char* const kPrepareScript;

}  // namespace flatshard::data
