#include "flatshard/core/philox.h"

#include <gtest/gtest.h>

namespace flatshard {
namespace {

// Known answers of the Random123 distribution (kat_vectors, philox4x32-10).
TEST(Philox, KnownAnswers) {
  const std::array<std::uint32_t, 4> zeros{
      0x6627e8d5,
      0xe169c58d,
      0xbc57ac4c,
      0x9b00dbd8};
  EXPECT_EQ(Philox(0)(0, 0), zeros);
  const std::array<std::uint32_t, 4> ones{
      0x408f276d,
      0x41c83b0e,
      0xa20bc7c6,
      0x6d5451fd};
  const std::uint64_t all = ~std::uint64_t{0};
  EXPECT_EQ(Philox(all)(all, all), ones);
}

TEST(StableHash, KnownAnswersOfFnv1a) {
  EXPECT_EQ(stable_hash(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(stable_hash("a"), 0xaf63dc4c8601ec8cULL);
}

}  // namespace
}  // namespace flatshard
