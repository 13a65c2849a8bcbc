#pragma once

namespace flatshard::data {

/// The texts of python/flatshard/hf_*.py and prepare_tokens.py, put here by
/// CMake.
extern const char* const kPrepareScript;

}  // namespace flatshard::data
