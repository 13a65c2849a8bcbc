#include "flatshard/core/home_folder.h"

#include <gtest/gtest.h>
#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace flatshard {
namespace {

TEST(HomeFolder, IsWhatATildeBeginsWith) {
  const char* before = std::getenv("HOME");
  const std::string old = before == nullptr ? "" : before;
  ::setenv("HOME", "/some/home", 1);
  EXPECT_EQ(expand_home("~"), "/some/home");
  EXPECT_EQ(expand_home("~/runs/x"), "/some/home/runs/x");
  EXPECT_EQ(expand_home("a/~/b"), "a/~/b");
  EXPECT_EQ(expand_home("./~"), "./~");
  EXPECT_EQ(expand_home(""), "");
  EXPECT_EQ(expand_home("~no such user/x"), "~no such user/x");
  const passwd* root = ::getpwuid(0);
  if (root != nullptr) {
    EXPECT_EQ(
        expand_home(std::string("~") + root->pw_name + "/x"),
        std::string(root->pw_dir) + "/x");
  }
  ::unsetenv("HOME");
  const passwd* own = ::getpwuid(::getuid());
  if (own != nullptr) {
    EXPECT_EQ(expand_home("~/x"), std::string(own->pw_dir) + "/x");
  }
  if (before != nullptr) {
    ::setenv("HOME", old.c_str(), 1);
  }
}

}  // namespace
}  // namespace flatshard
