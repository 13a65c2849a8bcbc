#pragma once

#include <fmt/format.h>

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace flatshard {

/// The kind of failure that an `Error` reports. A program decides on the code,
/// a person reads the message.
enum class ErrorCode {
  config,    ///< a configuration value or option is wrong
  usage,     ///< the API was called in a way that cannot work
  comm,      ///< a collective or a peer failed
  timeout,   ///< something did not happen in time
  cuda,      ///< the GPU or its driver reported an error
  io,        ///< a file could not be read or written
  format,    ///< a file's content is not what it should be
  memory,    ///< not enough memory, or a memory rule was broken
  internal,  ///< a bug in Flatshard
};

std::string_view to_string(ErrorCode code);

/// The only exception type of Flatshard.
///
/// The message has what was expected, what was found and which option or name
/// to change. `context` is where it happened, e.g.
/// "rank 3/8 | step 120 | unit layers.7 | all_gather".
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string message, std::string context = {});

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& context() const { return context_; }

  /// Returns the same error with more context: `outer` is prepended to the
  /// context.
  Error with_context(std::string_view outer) const;

 private:
  ErrorCode code_;
  std::string message_;
  std::string context_;
};

/// Throws Error{code} with a message formatted by fmt. Code `internal` adds
/// the place in the source.
[[noreturn]] void throw_error(
    ErrorCode code,
    std::string message,
    std::source_location where = std::source_location::current());

}  // namespace flatshard

/// FLATSHARD_CHECK(cond, code, "expected ..., got {}", value): throws
/// Error{ErrorCode::code} when `cond` is false. The text is an fmt format.
#define FLATSHARD_CHECK(cond, code, ...) \
  do {                                   \
    if (!(cond)) [[unlikely]] {          \
      ::flatshard::throw_error(          \
          ::flatshard::ErrorCode::code,  \
          ::fmt::format(__VA_ARGS__));   \
    }                                    \
  } while (false)

/// FLATSHARD_THROW(code, "...", args): throws always.
#define FLATSHARD_THROW(code, ...)  \
  ::flatshard::throw_error(         \
      ::flatshard::ErrorCode::code, \
      ::fmt::format(__VA_ARGS__))
