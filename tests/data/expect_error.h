#pragma once

#include <gtest/gtest.h>

#include <string>

#include "flatshard/core/error.h"

namespace flatshard {

/// Returns the message of the Error with `code` that `call` must throw.
template <class Call>
std::string error_message(ErrorCode code, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    return error.message();
  }
  ADD_FAILURE() << "expected an Error, got none";
  return {};
}

}  // namespace flatshard
