#include "flatshard/core/error.h"

namespace flatshard {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::config:
      return "config";
    case ErrorCode::usage:
      return "usage";
    case ErrorCode::comm:
      return "comm";
    case ErrorCode::timeout:
      return "timeout";
    case ErrorCode::cuda:
      return "cuda";
    case ErrorCode::io:
      return "io";
    case ErrorCode::format:
      return "format";
    case ErrorCode::memory:
      return "memory";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

Error::Error(ErrorCode code, std::string message, std::string context)
    : std::runtime_error(
          context.empty()
              ? fmt::format("{} error: {}", to_string(code), message)
              : fmt::format(
                    "[{}] {} error: {}",
                    context,
                    to_string(code),
                    message)),
      code_(code),
      message_(std::move(message)),
      context_(std::move(context)) {
}

Error Error::with_context(std::string_view outer) const {
  return Error(
      code_,
      message_,
      context_.empty() ? std::string(outer)
                       : fmt::format("{} | {}", outer, context_));
}

void throw_error(
    ErrorCode code,
    std::string message,
    std::source_location where) {
  if (code == ErrorCode::internal) {
    message += fmt::format(
        " ({}:{}; this is a bug in Flatshard, please report it)",
        where.file_name(),
        where.line());
  }
  throw Error(code, std::move(message));
}

}  // namespace flatshard
