#include "flatshard/data/utf8.h"

#include <gtest/gtest.h>

namespace flatshard::data {
namespace {

TEST(Utf8, PrintableTextHasNoControlCharactersAndNoOtherBytes) {
  EXPECT_EQ(
      printable("a\tb\n\r\x01\x7f \u00e9\u20ac\U0001F600", false),
      "a\\tb\\n\\r\\x01\\x7f \u00e9\u20ac\U0001F600");
  EXPECT_EQ(printable("a\tb\n\r", true), "a\tb\n\\r");
  for (const char* bad :
       {"\x80",
        "\xc1\xbf",
        "\xe0\x80\x80",
        "\xed\xa0\x80",
        "\xf4\x90\x80\x80",
        "\xf0\x9f\x98",
        "\xc3",
        "\xff"}) {
    const std::string text = printable("a" + std::string(bad) + "b", false);
    std::string wanted = "a";
    for (std::size_t i = 0; i < std::string(bad).size(); ++i) {
      wanted += "\uFFFD";
    }
    EXPECT_EQ(text, wanted + "b");
  }
}

}  // namespace
}  // namespace flatshard::data
