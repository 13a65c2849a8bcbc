#include "flatshard/format/digest.h"

#include <gtest/gtest.h>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

// The empty input, from xxHash's own test vectors.
TEST(Digest, IsXxh3) {
  EXPECT_EQ(digest({}), 0x2d06800538d394c2ULL);
}

TEST(Digest, HexGoesThereAndBack) {
  const std::vector<std::uint64_t> values{
      0,
      1,
      0x0123456789abcdefULL,
      ~std::uint64_t{0}};
  const std::string text = digests_to_hex(values);
  EXPECT_EQ(
      text,
      "0000000000000000"
      "0000000000000001"
      "0123456789abcdef"
      "ffffffffffffffff");
  EXPECT_EQ(digests_from_hex(text), values);
}

TEST(Digest, RefusesWhatIsNoHex) {
  EXPECT_THROW(digests_from_hex("0123"), Error);
  EXPECT_THROW(digests_from_hex("0123456789ABCDEF"), Error);
  EXPECT_THROW(digests_from_hex("0123456789abcdeg"), Error);
}

TEST(Digest, CountsBlocks) {
  EXPECT_EQ(num_digest_blocks(0), 0u);
  EXPECT_EQ(num_digest_blocks(1), 1u);
  EXPECT_EQ(num_digest_blocks(kDigestBlock), 1u);
  EXPECT_EQ(num_digest_blocks(kDigestBlock + 1), 2u);
}

}  // namespace
}  // namespace flatshard
