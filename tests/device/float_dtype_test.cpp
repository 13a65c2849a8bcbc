#include "flatshard/device/float_dtype_of.h"

#include "flatshard/core/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using kernels::FloatDtype;
using ::testing::HasSubstr;

TEST(FloatDtype, KernelsSupportThree) {
  EXPECT_EQ(find_float_dtype(at::kFloat), FloatDtype::float32);
  EXPECT_EQ(find_float_dtype(at::kBFloat16), FloatDtype::bfloat16);
  EXPECT_EQ(find_float_dtype(at::kHalf), FloatDtype::float16);
  for (const at::ScalarType other :
       {at::kDouble, at::kLong, at::kShort, at::kFloat8_e4m3fn}) {
    EXPECT_FALSE(find_float_dtype(other)) << c10::toString(other);
  }
}

TEST(FloatDtype, AnotherOneIsNamed) {
  EXPECT_EQ(float_dtype_of(at::kHalf), FloatDtype::float16);
  try {
    float_dtype_of(at::kDouble);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("got Double"));
  }
}

}  // namespace
}  // namespace flatshard
