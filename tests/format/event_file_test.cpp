#include "flatshard/format/event_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "flatshard/core/error.h"
#include "tests/support/message_of.h"
#include "tests/support/temp_folder.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;

// RFC 3720, appendix B.4, and the check value of the CRC catalogues.
TEST(EventFile, Crc32cOfKnownTexts) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string ascending;
  for (char byte = 0; byte < 32; ++byte) {
    ascending += byte;
  }
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return text;
}

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Returns the records of a file after the one of its version.
std::vector<std::string> later_records(const std::filesystem::path& path) {
  const std::string all = content(path);
  std::vector<std::string> records;
  for (std::size_t at = 0; at < all.size();) {
    const auto length = static_cast<unsigned char>(all[at]);
    records.push_back(all.substr(at, 12 + length + 4));
    at += records.back().size();
  }
  records.erase(records.begin());
  return records;
}

// Masks of CRC-32C values computed from the definition by another program.
TEST(EventFile, ARecordIsFramedByLengthAndMaskedSums) {
  EXPECT_EQ(
      hex(tf_record("123456789")),
      "0900000000000000"
      "37f97139"
      "313233343536373839"
      "e5b08ac7");
}

TEST(EventFile, EventsAreTheBytesOfTheirMessages) {
  const TempFolder folder;
  EventFile file(folder.path(), 1.5, 1);
  // 09: field 1, 8 bytes: 1.5. 1a 0d: field 3, 13 bytes.
  const std::string version = "\x09" + std::string("\0\0\0\0\0\0\xf8\x3f", 8) +
                              "\x1a\x0d" + "brain.Event:2";
  EXPECT_EQ(hex(content(file.path())), hex(tf_record(version)));
  file.write(1.5, 300, {{"a", 0.5}, {"bc", -2}});
  file.restart(1.5, 201);
  const auto records = later_records(file.path());
  ASSERT_EQ(records.size(), 2u);
  // 10 ac 02: field 2, varint 300. 2a 15: field 5, 21 bytes of two values: 0a
  // 08: field 1, 8 bytes: 0a 01 "a" and 15, field 2, 4 bytes: 0.5.
  EXPECT_EQ(
      hex(records[0].substr(12, records[0].size() - 16)),
      "09000000000000f83f10ac022a15"
      "0a080a016115"
      "0000003f"
      "0a090a02626315"
      "000000c0");
  // 3a 02: field 7, 2 bytes: 08 01, field 1, START.
  EXPECT_EQ(
      hex(records[1].substr(12, records[1].size() - 16)),
      "09000000000000f83f10c9013a020801");
  EXPECT_EQ(
      records[0],
      tf_record(records[0].substr(12, records[0].size() - 16)));
}

TEST(EventFile, NamesSortByTimeAndAttempt) {
  const TempFolder folder;
  const auto name = [&](double time, int attempt) {
    return EventFile(folder.path(), time, attempt).path().filename().string();
  };
  EXPECT_LT(name(999999999.5, 1), name(1000000000.5, 2));
  EXPECT_LT(name(1000000000.5, 9), name(1000000000.5, 10));
  EXPECT_THAT(name(1764285555, 3), HasSubstr("tfevents.1764285555.0003."));
}

TEST(EventFile, AFolderThatIsNotThereIsNamed) {
  EXPECT_THAT(
      testing::message_of([] { EventFile("/none", 1, 1); }),
      HasSubstr("cannot write /none/events.out.tfevents"));
}

}  // namespace
}  // namespace flatshard
