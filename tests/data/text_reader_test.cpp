#include "flatshard/data/text_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include "flatshard/core/error.h"
#include "flatshard/data/utf8.h"
#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;
using namespace std::string_literals;

std::string gzip(const std::string& text) {
  z_stream stream{};
  constexpr int kGzip = 16;
  ::deflateInit2(
      &stream,
      1,
      Z_DEFLATED,
      MAX_WBITS + kGzip,
      8,
      Z_DEFAULT_STRATEGY);
  std::string out(::deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(::deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  ::deflateEnd(&stream);
  return out;
}

std::string zstd(const std::string& text) {
  std::string out(::ZSTD_compressBound(text.size()), '\0');
  out.resize(
      ::ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

std::string read(const std::string& bytes) {
  const TempFolder temp;
  return TextReader(temp.write("a", bytes)).read_all();
}

std::string read_problem(const std::string& bytes) {
  return error_message(ErrorCode::format, [&] { read(bytes); });
}

/// Longer than the readers' buffers, and no repetition of one block.
std::string long_text() {
  std::string text;
  for (int i = 0; text.size() < (std::size_t{3} << 18); ++i) {
    text += fmt::format("line {} é\n", i * 7919);
  }
  return text;
}

TEST(TextReader, CompressedFilesAsTheyAre) {
  const std::string text = long_text();
  EXPECT_EQ(read(text), text);
  EXPECT_EQ(read(gzip(text)), text);
  EXPECT_EQ(read(zstd(text)), text);
  // Members and frames one after the other, and zeros of a tape after them.
  EXPECT_EQ(read(gzip("one\n") + gzip("") + gzip(text)), "one\n" + text);
  EXPECT_EQ(read(gzip("one") + std::string(700, '\0')), "one");
  EXPECT_EQ(read(zstd("one\n") + zstd(text) + zstd("")), "one\n" + text);
  // A skippable frame first.
  EXPECT_EQ(read("\x50\x2a\x4d\x18\x02\0\0\0ab"s + zstd("one")), "one");
}

TEST(TextReader, DamagedCompressionIsAnError) {
  const std::string text = long_text();
  for (const auto& [bytes, name] :
       {std::pair{gzip(text), "gzip"}, std::pair{zstd(text), "zstd"}}) {
    for (const std::size_t cut :
         {std::size_t{5}, bytes.size() / 2, bytes.size() - 1}) {
      EXPECT_THAT(
          read_problem(bytes.substr(0, cut)),
          HasSubstr(fmt::format("the {} data ends in the middle", name)));
    }
    EXPECT_THAT(
        read_problem(bytes + "garbage"),
        HasSubstr("followed by other"));
  }
  std::string damaged = gzip(text);
  damaged[damaged.size() - 6] ^= 1;  // of the checksum
  EXPECT_THAT(read_problem(damaged), HasSubstr("the gzip data is damaged"));
  damaged = zstd(text);
  damaged[4] ^= 0xff;  // of the header
  EXPECT_THAT(read_problem(damaged), HasSubstr("the zstd data"));
}

TEST(TextReader, ByteOrderMarks) {
  EXPECT_EQ(read("\xef\xbb\xbf"s + "a"), "a");
  EXPECT_EQ(read("\xff\xfe"s + "a\0\xe9\0\x3d\xd8\x00\xde"s), "aé\U0001F600");
  EXPECT_EQ(read("\xfe\xff"s + "\0a\0\xe9\xd8\x3d\xde\x00"s), "aé\U0001F600");
  EXPECT_EQ(read(gzip("\xff\xfe"s + "a\0"s)), "a");
  EXPECT_EQ(read("\xff\xfe"s + "\x3d\xd8"s + "a\0"s), "\uFFFDa");
  EXPECT_THAT(read_problem("\xff\xfe"s + "a\0b"s), HasSubstr("cut off"));
  EXPECT_THAT(read_problem("\xff\xfe\0\0a\0\0\0"s), HasSubstr("got UTF-32"));
  EXPECT_EQ(read("\xef\xbb\xbf"s), "");
  EXPECT_EQ(read("\xff\xfe"s), "");
}

TEST(TextReader, Utf16InChunks) {
  std::string wide = "\xff\xfe";
  std::string narrow;
  for (int i = 0; i < 200000; ++i) {
    wide += "\x3d\xd8\x00\xde"s + "x\0"s;
    narrow += "\U0001F600x";
  }
  EXPECT_EQ(read(wide), narrow);
}

TEST(TextReader, Lines) {
  const TempFolder temp;
  TextReader reader(temp.write("a", "one\r\n\ntwo"));
  std::vector<std::string> lines;
  for (std::string line; reader.read_line(line);) {
    lines.push_back(line);
  }
  EXPECT_EQ(lines, (std::vector<std::string>{"one\r", "", "two"}));
}

TEST(Utf8, FindsTheFirstByteThatIsNone) {
  EXPECT_EQ(find_invalid_utf8("a\u00e9\u20ac\U0001F600 more text"), kAllUtf8);
  for (const char* bad :
       {"\x80",
        "\xc1\xbf",
        "\xe0\x80\x80",
        "\xed\xa0\x80",
        "\xf4\x90\x80\x80",
        "\xf0\x9f\x98",
        "\xc3",
        "\xff"}) {
    EXPECT_EQ(find_invalid_utf8("12345678" + std::string(bad)), 8U) << bad;
  }
  std::string text = "caf\xe9 \xff\xfe.";
  EXPECT_EQ(replace_invalid_utf8(text), 3);
  EXPECT_EQ(text, "caf\uFFFD \uFFFD\uFFFD.");
}

}  // namespace
}  // namespace flatshard::data
