#include "flatshard/format/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Safetensors : public ::testing::Test {
 protected:
  Safetensors() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "flatshard-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    path_ = folder_ / "model.safetensors";
  }
  ~Safetensors() override { std::filesystem::remove_all(folder_); }

  void write_raw(const std::string& header, const std::string& data) {
    write_raw(header.size(), header + data);
  }
  void write_raw(std::uint64_t length, const std::string& rest) {
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << rest;
  }

  std::string refused(ErrorCode code = ErrorCode::format) {
    try {
      SafetensorsReader reader(path_);
    } catch (const Error& error) {
      EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
      EXPECT_THAT(error.message(), HasSubstr(path_.string()));
      return error.message();
    }
    return "no error";
  }

  std::filesystem::path folder_;
  std::filesystem::path path_;
};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string content_of(
    const SafetensorsReader& reader,
    const SafetensorsEntry& entry) {
  std::vector<std::byte> bytes(entry.nbytes());
  reader.read(entry, 0, bytes);
  return text_of(bytes);
}

std::string content_of(const SafetensorsReader& reader, std::string_view name) {
  return content_of(reader, reader.entry(name));
}

template <class Call>
std::string message(ErrorCode code, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    return error.message();
  }
  return "no error";
}

TEST_F(Safetensors, RoundTrip) {
  const std::vector<float> weight{1, 2, 3, 4, 5, 6};
  const std::vector<std::int64_t> step{42};
  const std::vector<std::uint16_t> half{1, 2, 3};
  {
    SafetensorsWriter writer(
        path_,
        {{"b.half", "BF16", {3}},
         {"weight", "F32", {2, 3}},
         {"step", "I64", {}},
         {"none", "F32", {0, 7}}},
        {{"format", "pt"}, {"quote", "a \"b\" \xc3\xa9"}});
    // In pieces and in any order.
    writer.write("weight", bytes_of(weight).subspan(8), 8);
    writer.write("b.half", bytes_of(half));
    writer.write("weight", bytes_of(weight).first(8));
    writer.write("step", bytes_of(step));
    EXPECT_FALSE(std::filesystem::exists(path_));
    writer.finish();
  }
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  EXPECT_EQ(reader.metadata().at("quote"), "a \"b\" \xc3\xa9");
  ASSERT_EQ(reader.entries().size(), 4U);
  EXPECT_EQ(reader.entry("weight").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(reader.entry("weight").dtype, "F32");
  EXPECT_EQ(content_of(reader, "weight"), text_of(bytes_of(weight)));
  EXPECT_EQ(content_of(reader, "step"), text_of(bytes_of(step)));
  EXPECT_EQ(content_of(reader, "b.half"), text_of(bytes_of(half)));
  EXPECT_TRUE(reader.entry("step").shape.empty());
  EXPECT_TRUE(content_of(reader, "none").empty());
  EXPECT_TRUE(reader.contains("none"));
  EXPECT_FALSE(reader.contains("nine"));
  for (const char* name : {"weight", "step", "b.half"}) {
    const std::uint64_t address = reader.offset(reader.entry(name));
    const auto item = static_cast<std::uint64_t>(
        safetensors_item_nbytes(reader.entry(name).dtype));
    EXPECT_EQ(address % item, 0U) << name;
  }
}

TEST_F(Safetensors, NoTensorsAtAll) {
  SafetensorsWriter(path_, {}).finish();
  EXPECT_TRUE(SafetensorsReader(path_).entries().empty());
}

TEST_F(Safetensors, ReadsAHandMadeFile) {
  write_raw(
      R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},)"
      R"("a":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]}}  )",
      "abcdef");
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.entries()[0].name, "a");
  EXPECT_EQ(content_of(reader, "a"), "abcd");
  EXPECT_EQ(content_of(reader, "b"), "ef");
}

TEST_F(Safetensors, AFileCutOffWhileItIsOpenIsNamed) {
  write_raw(
      R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]}})",
      "abcdef");
  const SafetensorsReader reader(path_);
  std::byte middle{};
  reader.read(reader.entry("a"), 3, {&middle, 1});
  EXPECT_EQ(middle, std::byte{'d'});
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 2);
  try {
    content_of(reader, "a");
    FAIL() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_THAT(error.message(), HasSubstr(path_.string()));
  }
}

TEST_F(Safetensors, UnknownTensorNamesTheNearest) {
  write_raw(
      R"({"norm.weight":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
      "");
  const SafetensorsReader reader(path_);
  EXPECT_THAT(
      message(ErrorCode::format, [&] { reader.entry("norm.wieght"); }),
      HasSubstr("has no tensor 'norm.wieght'; the nearest name is "
                "'norm.weight'"));
}

TEST_F(Safetensors, BadHeadersAreRefusedByName) {
  struct Case {
    std::string header;
    std::string data;
    std::string expected;
  };
  const auto tensor = [](const std::string& body) {
    return "{\"w\":{" + body + "}}";
  };
  const std::vector<Case> cases{
      {"", "", "not a JSON object"},
      {"[]", "", "not a JSON object"},
      {"{\"w\":", "", "not a JSON object"},
      {"null", "", "not a JSON object"},
      {R"({"w":3})", "", "tensor 'w': expected an object with dtype"},
      {R"({"w":{}})", "", "expected an object with dtype"},
      {tensor(R"("dtype":4,"shape":[],"data_offsets":[0,4])"),
       "abcd",
       "expected an object with dtype"},
      {tensor(R"("dtype":"F32","data_offsets":[0,4])"),
       "abcd",
       "expected shape to be a list of integers, got nothing"},
      {tensor(R"("dtype":"F32","shape":[1])"),
       "abcd",
       "expected data_offsets to be a list of integers, got nothing"},
      {tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"),
       "abcd",
       "expected shape to be a list of integers, got [-1]"},
      {tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"),
       "abcd",
       "got [1.0]"},
      {tensor(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"),
       "abcd",
       "got [\"1\"]"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"),
       "abcd",
       "expected data_offsets [begin, end], got [0]"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"),
       "abcd",
       "expected data_offsets [begin, end], got [4,0]"},
      {tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
       "abcd",
       "dtype F32 and shape [2] do not fit the 4 bytes"},
      {tensor(
           R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])"),
       "",
       "do not fit the 0 bytes"},
      {tensor(
           R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,0])"),
       "",
       "list of integers"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"),
       "abcdefgh",
       "tensor 'w' should start at byte 0 of the data, but starts at 4"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       "abc",
       "tensor 'b' should start at byte 2 of the data, but starts at 1"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       "a",
       "tensor 'a' occurs twice"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"),
       "abc",
       "the tensors have 4 bytes, but the file has 3"},
      {tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"),
       "abcde",
       "the tensors have 4 bytes, but the file has 5"},
      {R"({"__metadata__":[]})", "", "expected __metadata__ to map text"},
      {R"({"__metadata__":{"a":1}})", "", "expected __metadata__ to map text"},
  };
  for (const Case& item : cases) {
    write_raw(item.header, item.data);
    EXPECT_THAT(refused(), HasSubstr(item.expected)) << item.header;
  }
  write_raw(
      tensor(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])"),
      "abcd");
  EXPECT_THAT(
      message(ErrorCode::format, [&] { SafetensorsReader reader(path_); }),
      AllOf(HasSubstr("unknown safetensors dtype 'F31'"), HasSubstr("BF16")));
}

TEST_F(Safetensors, BadLengthsAreRefused) {
  std::ofstream(path_).close();
  EXPECT_THAT(refused(), HasSubstr("expected a safetensors file, got 0 bytes"));
  std::ofstream(path_) << "short";
  EXPECT_THAT(refused(), HasSubstr("got 5 bytes"));
  write_raw(3, "{}");
  EXPECT_THAT(
      refused(),
      HasSubstr("the header should have 3 bytes, but the file has 2"));
  write_raw(~std::uint64_t{0}, "{}");
  EXPECT_THAT(
      refused(),
      HasSubstr("it is truncated or not a safetensors file"));
  std::filesystem::remove(path_);
  EXPECT_THAT(refused(ErrorCode::io), HasSubstr("cannot open"));
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  {
    SafetensorsWriter writer(
        path_,
        {{"a", "F32", {3}}, {"b", "U8", {5}}},
        {{"k", "v"}});
    writer.write("a", bytes_of(std::vector<float>{1, 2, 3}));
    writer.write("b", bytes_of(std::vector<std::uint8_t>{1, 2, 3, 4, 5}));
    writer.finish();
  }
  const auto size = std::filesystem::file_size(path_);
  for (std::uintmax_t length = size; length-- > 0;) {
    std::filesystem::resize_file(path_, length);
    EXPECT_NE(refused(), "no error") << length;
  }
}

// Random damage to the header must give an Error or a file that is read within
// its bounds, never anything else.
TEST_F(Safetensors, RandomDamageNeverEscapes) {
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})";
  std::mt19937 random(1);
  int refusals = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = header;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i) {
      const std::string alphabet("0123456789-{}[]\",:aFU.e\0\xff", 25);
      damaged[random() % damaged.size()] = alphabet[random() % alphabet.size()];
    }
    write_raw(damaged, "abcdefghijkl");
    try {
      const SafetensorsReader reader(path_);
      std::size_t nbytes = 0;
      for (const SafetensorsEntry& entry : reader.entries()) {
        nbytes += content_of(reader, entry).size();
      }
      EXPECT_EQ(nbytes, 12U);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::format);
      ++refusals;
    }
  }
  EXPECT_GT(refusals, 2000);
}

TEST_F(Safetensors, AnUnfinishedFileNeverAppears) {
  {
    SafetensorsWriter writer(path_, {{"a", "U8", {4}}});
    writer.write("a", bytes_of(std::vector<std::uint8_t>{1, 2}));
    EXPECT_THAT(
        message(ErrorCode::usage, [&] { writer.finish(); }),
        HasSubstr("tensor 'a' has 4 bytes, but 2 were written"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(Safetensors, WriterRefusesWrongUse) {
  const auto build = [&](std::vector<SafetensorsSpec> specs) {
    return message(ErrorCode::usage, [&] {
      SafetensorsWriter writer(path_, specs);
    });
  };
  EXPECT_THAT(
      build({{"a", "U8", {1}}, {"a", "F32", {1}}}),
      HasSubstr("tensor 'a' is given twice"));
  EXPECT_THAT(build({{"a", "U8", {-1}}}), HasSubstr("negative size"));
  EXPECT_THAT(
      build({{"__metadata__", "U8", {1}}}),
      HasSubstr("cannot be named"));
  EXPECT_THAT(
      message(
          ErrorCode::io,
          [] { SafetensorsWriter writer("/none/x.safetensors", {}); }),
      HasSubstr("cannot write /none/x.safetensors"));
  SafetensorsWriter writer(path_, {{"a", "U8", {4}}});
  const std::vector<std::uint8_t> three{1, 2, 3};
  EXPECT_THAT(
      message(ErrorCode::usage, [&] { writer.write("a", bytes_of(three), 2); }),
      HasSubstr("tensor 'a' has 4 bytes, but bytes [2, 5)"));
  EXPECT_THAT(
      message(ErrorCode::usage, [&] { writer.write("b", bytes_of(three)); }),
      HasSubstr("tensor 'b' was not announced"));
}

TEST_F(Safetensors, PythonReadsItToo) {
  const auto python = [&](const std::string& code) {
    return std::system(
        fmt::format("'{}' -c \"{}\" 2>/dev/null", FLATSHARD_TEST_PYTHON, code)
            .c_str());
  };
  if (python("import safetensors.numpy") != 0) {
    GTEST_SKIP() << FLATSHARD_TEST_PYTHON
                 << " has no Python package 'safetensors'";
  }
  {
    SafetensorsWriter writer(
        path_,
        {{"a", "F32", {2, 2}}, {"b", "I64", {}}},
        {{"format", "pt"}});
    writer.write("a", bytes_of(std::vector<float>{1, 2, 3, 4}));
    writer.write("b", bytes_of(std::vector<std::int64_t>{7}));
    writer.finish();
  }
  EXPECT_EQ(
      python(fmt::format(
          "from safetensors.numpy import load_file, save_file\n"
          "d = load_file('{0}')\n"
          "assert d['a'].tolist() == [[1, 2], [3, 4]]\n"
          "assert d['b'].item() == 7\n"
          "save_file(d, '{0}', {{'who': 'python'}})\n",
          path_.string())),
      0);
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.metadata().at("who"), "python");
  EXPECT_EQ(
      content_of(reader, "a"),
      text_of(bytes_of(std::vector<float>{1, 2, 3, 4})));
}

}  // namespace
}  // namespace flatshard
