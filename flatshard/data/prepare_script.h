#pragma once

namespace flatshard::data {

/// The text of python/flatshard/prepare_tokens.py, put here by CMake.
extern const char* const kPrepareScript;

}  // namespace flatshard::data
