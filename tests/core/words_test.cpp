#include "flatshard/core/words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace flatshard {
namespace {

using ::testing::ElementsAre;

enum class Shape { round, square, flat };

constexpr Word<Shape> kShapes[] = {
    {"round", Shape::round},
    {"square", Shape::square}};

TEST(Words, GoBothWays) {
  EXPECT_THAT(words_of(kShapes), ElementsAre("round", "square"));
  EXPECT_EQ(word_of(kShapes, Shape::square), "square");
  EXPECT_EQ(word_of(kShapes, Shape::flat), "unknown");
  EXPECT_EQ(value_of("shape", kShapes, "square"), Shape::square);
  Shape shape = Shape::flat;
  EXPECT_FALSE(read_word(kShapes, "flat", shape));
  EXPECT_EQ(shape, Shape::flat);
  EXPECT_TRUE(read_word(kShapes, "round", shape));
  EXPECT_EQ(shape, Shape::round);
}

TEST(Words, AnUnknownOneIsAnErrorWithTheNearest) {
  try {
    value_of("shape", kShapes, "sqare");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    EXPECT_EQ(
        error.message(),
        "shape: expected one of round, square, got 'sqare'; did you mean "
        "'square'?");
  }
}

}  // namespace
}  // namespace flatshard
