#include "flatshard/data/json_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> rows(
    const std::string& json,
    const std::string& field = "text") {
  const TempFolder temp;
  JsonRows reader(temp.write("a.json", json), field);
  std::vector<std::string> all;
  for (std::string text; reader.next(text);) {
    all.push_back(text);
  }
  return all;
}

std::string problem(const std::string& json) {
  return error_message(ErrorCode::format, [&] { rows(json); });
}

TEST(JsonRows, LinesAListAndObjectsOfSeveralLines) {
  const auto two = ElementsAre("a", "b");
  EXPECT_THAT(rows("{\"text\": \"a\"}\n\n{\"text\": \"b\"}"), two);
  EXPECT_THAT(
      rows("\xef\xbb\xbf{\"text\":\"a\"}\r\n{\"text\":\"b\"}\r\n"),
      two);
  EXPECT_THAT(rows("{\"text\":\"a\"}\n\xef\xbb\xbf{\"text\":\"b\"}\n"), two);
  EXPECT_THAT(rows("[{\"text\": \"a\"}, {\"text\": \"b\"}]\n"), two);
  EXPECT_THAT(rows("\n[\n {\"text\": \"a\"},\n {\n\"text\": \"b\"\n}\n]"), two);
  EXPECT_THAT(rows("{\n\"text\": \"a\"}\n{\n\"text\": \"b\"\n}\n"), two);
  EXPECT_THAT(rows("{\"text\": null}\n{\"text\": \"\"}"), ElementsAre("", ""));
  EXPECT_THAT(rows("[]"), ElementsAre());
  EXPECT_THAT(rows(""), ElementsAre());
}

TEST(JsonRows, OtherFieldsMayHoldAnything) {
  const std::string deep(100000, '[');
  const std::string closed(100000, ']');
  for (const std::string& value :
       {std::string("NaN"),
        std::string("-Infinity"),
        std::string("1e400"),
        std::string(9999, '7'),
        std::string("\"\\ud83d\""),
        std::string("\"\xff\\x\""),
        std::string("{\"text\": [1, {\"text\": \"no\"}]}"),
        deep + closed,
        std::string("1, \"b\": 2")}) {
    EXPECT_THAT(
        rows("{\"b\": " + value + ", \"text\": \"a\", \"c\": " + value + "}"),
        ElementsAre("a"))
        << value.substr(0, 20);
  }
}

TEST(JsonRows, EscapesAndHalvesOfSurrogatePairs) {
  EXPECT_THAT(
      rows(R"({"text": "\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00"})"),
      ElementsAre("\"\\/\b\f\n\r\t\u00e9\U0001F600"));
  EXPECT_THAT(rows(R"({"text": "x \ud83d y"})"), ElementsAre("x \uFFFD y"));
  EXPECT_THAT(
      rows(R"({"text": "\ud83d\u0041\ude00"})"),
      ElementsAre("\uFFFDA\uFFFD"));
  EXPECT_THAT(rows(R"({"te\u0078t": "a"})"), ElementsAre("a"));
}

TEST(JsonRows, ErrorsNameTheLine) {
  EXPECT_THAT(
      problem("{\"text\": \"a\"}\n{\"text\": \"b"),
      HasSubstr("a.json:2: the object that begins here does not end"));
  EXPECT_THAT(
      problem("{\"text\": \"a\"}\n{\"text\": \"b\"} {\"text\": \"c\"}"),
      HasSubstr("a.json:2: more follows the object in its line"));
  EXPECT_THAT(
      problem("[{\"text\": \"a\"},\n{\"text\": \"b\"}"),
      HasSubstr("a.json:2: the list is cut off"));
  EXPECT_THAT(
      problem("[{\"text\": \"a\"}]\n{\"text\": \"b\"}"),
      HasSubstr("a.json:2: more follows the list"));
  EXPECT_THAT(
      problem("[\n{\"text\": \"a\"},\n\"b\"]"),
      HasSubstr("a.json:3: expected an object, got text"));
  EXPECT_THAT(
      problem("{\"data\": [], \"version\": 1}"),
      ::testing::AllOf(
          HasSubstr("expected the text field 'text', found data, version"),
          HasSubstr("--text-field"),
          HasSubstr("jq -c '.data[]'")));
  EXPECT_THAT(
      problem("{\"messages\": []}"),
      HasSubstr("found messages; name another with --text-field (rows of "
                "chats need --chat)"));
  EXPECT_THAT(
      problem("{\"text\": 1}"),
      HasSubstr("expected text in the field 'text', got a number"));
  EXPECT_THAT(
      problem("{\"text\": \"a\", \"text\": \"b\"}"),
      HasSubstr("has the field 'text' twice"));
  EXPECT_THAT(
      problem("{\"text\": \"a\"}\n{\"text\": \"caf\xe9\"}"),
      HasSubstr("a.json:2: expected UTF-8 in the field 'text', got the byte "
                "0xe9"));
  EXPECT_THAT(
      problem("{'text': 'a'}"),
      HasSubstr("expected a name in double quotes"));
  EXPECT_THAT(
      problem("{\"text\": \"\\q\"}"),
      HasSubstr("the escape '\\q', which JSON does not have"));
  EXPECT_THAT(
      problem("{\"text\": \"\\u12g4\"}"),
      HasSubstr("four hexadecimal digits"));
  EXPECT_THAT(problem("{\"text\" \"a\"}"), HasSubstr("expected ':'"));
  EXPECT_THAT(problem("{\"a\": }"), HasSubstr("expected a value, got '}'"));
}

}  // namespace
}  // namespace flatshard::data
