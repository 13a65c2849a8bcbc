#include "flatshard/core/error.h"

#include <gtest/gtest.h>

namespace flatshard {
namespace {

TEST(Error, CarriesCodeMessageAndContext) {
  try {
    FLATSHARD_CHECK(1 + 1 == 3, config, "expected {}, got {}", 3, 1 + 1);
    FAIL() << "did not throw";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::config);
    EXPECT_EQ(e.message(), "expected 3, got 2");
    const Error outer =
        e.with_context("unit layers.7").with_context("rank 3/8");
    EXPECT_STREQ(
        outer.what(),
        "[rank 3/8 | unit layers.7] config error: expected 3, got 2");
  }
}

TEST(Error, InternalNamesTheSource) {
  try {
    FLATSHARD_THROW(internal, "impossible");
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("error_test.cpp"), std::string::npos);
  }
}

}  // namespace
}  // namespace flatshard
