#include "flatshard/device/graph_audit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace flatshard {
namespace {

using Kind = GraphMemory::Kind;

TEST(GraphMemory, KnowsWhatAGraphMayTouch) {
  GraphMemory memory;
  memory.add_managed(0x1000, 0x1000);
  memory.add_managed(0x4000, 0x1000);
  memory.allow(0x1200, 0x100);
  EXPECT_EQ(memory.kind(0xfff), Kind::no_address);
  EXPECT_EQ(memory.kind(0x1000), Kind::stray);
  EXPECT_EQ(memory.kind(0x11ff), Kind::stray);
  EXPECT_EQ(memory.kind(0x1200), Kind::allowed);
  EXPECT_EQ(memory.kind(0x12ff), Kind::allowed);
  EXPECT_EQ(memory.kind(0x1300), Kind::allowed);  // where a loop ends
  EXPECT_EQ(memory.kind(0x1301), Kind::stray);
  EXPECT_EQ(memory.kind(0x1fff), Kind::stray);
  EXPECT_EQ(memory.kind(0x2000), Kind::no_address);
  EXPECT_EQ(memory.kind(0x4800), Kind::stray);
}

TEST(GraphMemory, RangesMayOverlap) {
  GraphMemory memory;
  memory.add_managed(0x1000, 0x1000);
  memory.allow(0x1000, 0x400);
  memory.allow(0x1100, 0x10);
  memory.allow(0x1000, 0x20);  // the longer one stays
  EXPECT_EQ(memory.kind(0x1200), Kind::allowed);
  EXPECT_EQ(memory.kind(0x1401), Kind::stray);
}

TEST(GraphMemory, WhatNobodyManagesMayBeAllowed) {
  GraphMemory memory;
  memory.allow(0x9000, 8);
  EXPECT_EQ(memory.kind(0x9004), Kind::allowed);
}

TEST(GraphAudit, WordsOfAParameter) {
  // A pointer, two ints, and a rest that is too short for another.
  struct {
    std::uint64_t pointer = 0x7f00000012345678;
    std::int32_t sizes[2] = {3, 4};
    std::int32_t rest = 5;
  } parameter;
  EXPECT_THAT(
      words_of(&parameter, 20),
      ::testing::ElementsAre(0x7f00000012345678, 0x400000003));
  EXPECT_THAT(words_of(&parameter, 4), ::testing::IsEmpty());
}

TEST(GraphAudit, NamesAreReadableAndShort) {
  EXPECT_EQ(
      describe_stray("_ZN2at6nativeEv", 3, 0xabc),
      "at::native(), word 3: 0xabc");
  EXPECT_EQ(describe_stray("a copy", 0, 0x10), "a copy, word 0: 0x10");
  EXPECT_LT(describe_stray(std::string(5000, 'x'), 0, 1).size(), 200);
}

}  // namespace
}  // namespace flatshard
