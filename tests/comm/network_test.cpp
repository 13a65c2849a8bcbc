#include "flatshard/comm/network.h"

#include <gtest/gtest.h>

namespace flatshard {
namespace {

TEST(Network, LoopbackIsReachedFromLoopback) {
  EXPECT_EQ(address_towards("127.0.0.1", 29500), "127.0.0.1");
  EXPECT_EQ(address_towards("127.0.0.7", 29500), "127.0.0.1");
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("localhost"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
}

TEST(Network, AnUnknownHostHasNoAddress) {
  EXPECT_EQ(address_towards("host.invalid", 29500), "");
}

}  // namespace
}  // namespace flatshard
