#pragma once

#include <stdexcept>

// toml++, with the same macros wherever it is included.

namespace flatshard {

/// toml++ makes assertions about its input that can fail, such as for
/// "a.\xff = 1". A malformed file has to be an error, with and without NDEBUG.
struct TomlAssertion : std::logic_error {
  using std::logic_error::logic_error;
};

[[noreturn]] inline void toml_assertion_failed(const char* expression) {
  throw TomlAssertion(expression);
}

}  // namespace flatshard

#undef NDEBUG
#define TOML_ASSERT(expr) \
  ((expr) ? void() : ::flatshard::toml_assertion_failed(#expr))
// Header-only on purpose: the program then needs no libtomlplusplus.so where
// it runs.
#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_WINDOWS_COMPAT 0
#include <toml++/toml.h>
