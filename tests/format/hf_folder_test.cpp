#include "flatshard/format/hf_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "tests/support/temp_folder.h"

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void write(
    const std::filesystem::path& path,
    const std::vector<SafetensorsSpec>& specs) {
  SafetensorsWriter writer(path, specs);
  for (const SafetensorsSpec& spec : specs) {
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(spec.shape.at(0)),
        static_cast<std::byte>(spec.name[0]));
    writer.write(spec.name, bytes);
  }
  writer.finish();
}

std::byte byte_of(const HfFolder::Found& found, std::uint64_t at) {
  std::byte byte{};
  found.read(at, {&byte, 1});
  return byte;
}

std::string refused(const std::filesystem::path& folder) {
  try {
    HfFolder read(folder);
  } catch (const Error& error) {
    return error.message();
  }
  return "no error";
}

TEST(HfFolder, OneFile) {
  const TempFolder folder;
  EXPECT_THAT(
      refused(folder.path()),
      AllOf(
          HasSubstr("expected model.safetensors or"),
          HasSubstr(folder.path().string())));
  write(folder / "model.safetensors", {{"a", "U8", {3}}, {"b", "U8", {5}}});
  const HfFolder read(folder.path());
  EXPECT_THAT(read.names(), ElementsAre("a", "b"));
  EXPECT_TRUE(read.contains("b"));
  EXPECT_FALSE(read.contains("c"));
  EXPECT_EQ(read.find("b").entry->nbytes(), 5u);
  EXPECT_EQ(byte_of(read.find("b"), 4), std::byte{'b'});
  try {
    read.find("bb");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.message(),
        HasSubstr("has no tensor 'bb'; the nearest name is 'b'"));
  }
}

TEST(HfFolder, SeveralFilesGoThereAndBack) {
  const TempFolder folder;
  const std::vector<SafetensorsSpec> specs{
      {"a", "U8", {30}},
      {"b", "U8", {80}},
      {"c", "U8", {20}},
      {"d", "U8", {1}}};
  const auto files = plan_hf_files(specs, 100);
  ASSERT_EQ(files.size(), 3u);
  EXPECT_EQ(files[0].name, "model-00001-of-00003.safetensors");
  EXPECT_EQ(files[2].tensors.size(), 1u);
  for (const HfFile& file : files) {
    write(folder / file.name, file.tensors);
  }
  folder.write(kHfIndexName, hf_index_json(files));
  const HfFolder read(folder.path());
  EXPECT_THAT(read.names(), ElementsAre("a", "b", "c", "d"));
  for (const SafetensorsSpec& spec : specs) {
    EXPECT_EQ(read.find(spec.name).entry->shape, spec.shape);
    EXPECT_EQ(
        byte_of(read.find(spec.name), 0),
        static_cast<std::byte>(spec.name[0]));
  }
  EXPECT_THAT(hf_index_json(files), HasSubstr("\"total_size\": 131"));
  // A tensor larger than the limit has its own file.
  EXPECT_EQ(plan_hf_files(specs, 10).size(), 4u);
  EXPECT_EQ(plan_hf_files(specs, 1000)[0].name, "model.safetensors");
}

// transformers has this order: the single file first, then the files that an
// index names, then the last one by name.
TEST(HfFolder, TakesWhatTransformersTakes) {
  const TempFolder folder;
  write(folder / "a.safetensors", {{"x", "U8", {1}}, {"y", "U8", {2}}});
  write(folder / "b.safetensors", {{"y", "U8", {3}}, {"z", "U8", {4}}});
  folder.write(
      kHfIndexName,
      R"({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})");
  const HfFolder index(folder.path());
  EXPECT_THAT(index.names(), ElementsAre("x", "y"));
  EXPECT_EQ(index.find("x").entry->nbytes(), 1u);  // in a, not in b
  EXPECT_EQ(index.find("y").entry->nbytes(), 3u);  // in both
  EXPECT_THAT(index.passed_over(), ElementsAre("z"));

  write(folder / "model.safetensors", {{"only", "U8", {1}}});
  folder.write("pytorch_model.bin", "");
  folder.write("optimizer.bin", "");
  const HfFolder both(folder.path());
  EXPECT_THAT(both.names(), ElementsAre("only"));
  EXPECT_THAT(
      both.passed_over(),
      ElementsAre(kHfIndexName, "pytorch_model.bin"));
}

TEST(HfFolder, NamesOfAModelWithoutItsHead) {
  const TempFolder folder;
  write(folder / "model.safetensors", {{"norm.weight", "U8", {2}}});
  const HfFolder base(folder.path(), "model.");
  EXPECT_THAT(base.names(), ElementsAre("model.norm.weight"));
  EXPECT_EQ(base.find("model.norm.weight").entry->nbytes(), 2u);
  write(
      folder / "model.safetensors",
      {{"model.norm.weight", "U8", {2}}, {"score.weight", "U8", {2}}});
  EXPECT_THAT(
      HfFolder(folder.path(), "model.").names(),
      ElementsAre("model.norm.weight", "score.weight"));
  write(
      folder / "model.safetensors",
      {{"module.model.norm.weight", "U8", {2}}});
  try {
    HfFolder(folder.path()).find("model.norm.weight");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(
        error.message(),
        AllOf(
            HasSubstr("but 'module.model.norm.weight'"),
            HasSubstr("what it is wrapped in")));
  }
}

TEST(HfFolder, OtherFormsSayWhatToDo) {
  const std::pair<const char*, const char*> cases[] = {
      {"pytorch_model.bin", "pytorch_model.bin is no safetensors file"},
      {"adapter_model.safetensors", "merge it into its base model"},
      {"model.fp16.safetensors", "model.fp16.safetensors is a variant"},
      {"weights.gguf", "weights.gguf is no safetensors file"},
      {"notes.txt", "and no other weights"}};
  for (const auto& [name, says] : cases) {
    const TempFolder folder;
    folder.write(name, "");
    EXPECT_THAT(refused(folder.path()), HasSubstr(says)) << name;
  }
  EXPECT_THAT(refused("/no/such/folder"), HasSubstr("it is no folder"));
}

TEST(HfFolder, BadIndexesAreRefused) {
  const TempFolder folder;
  write(folder / "x.safetensors", {{"a", "U8", {3}}});
  const auto index = [&](const std::string& text) {
    folder.write(kHfIndexName, text);
    return refused(folder.path());
  };
  EXPECT_EQ(index(R"({"weight_map": {"a": "x.safetensors"}})"), "no error");
  EXPECT_THAT(index("{"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(index("[]"), HasSubstr("with a weight_map"));
  EXPECT_THAT(
      index(R"({"weight_map": {"a": "../x.safetensors"}})"),
      HasSubstr("expected the name of a file in the same folder"));
  EXPECT_THAT(
      index(R"({"weight_map": {"a": "y.safetensors"}})"),
      AllOf(HasSubstr("y.safetensors"), HasSubstr("is missing")));
  EXPECT_THAT(
      index(R"({"weight_map": {"b": "x.safetensors"}})"),
      HasSubstr("has no tensor 'b'"));
}

}  // namespace
}  // namespace flatshard
