#pragma once

#include <gtest/gtest.h>

#include <string>

#include "flatshard/core/error.h"

namespace flatshard {

/// Expects that `action()` throws Error{code} whose message contains `text`.
template <typename Action>
void expect_error(ErrorCode code, const std::string& text, Action action) {
  try {
    action();
    ADD_FAILURE() << "did not throw; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(error.message().find(text), std::string::npos)
        << "expected: " << text << "\nactual:   " << error.message();
  }
}

}  // namespace flatshard
