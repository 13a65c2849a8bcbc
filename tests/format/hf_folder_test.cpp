#include "flatshard/format/hf_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

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

// Two experts of three outputs and 64 inputs.
TEST(HfFolder, UnpacksMxfp4) {
  constexpr std::int64_t kExperts = 2, kOut = 3, kGroups = 2;
  constexpr std::int64_t kIn = kGroups * 32;
  const TempFolder folder;
  std::vector<std::byte> blocks, scales;
  for (std::int64_t i = 0; i < kExperts * kOut * kGroups * 16; ++i) {
    blocks.push_back(static_cast<std::byte>((i * 37 + i / 16) % 256));
  }
  for (std::int64_t i = 0; i < kExperts * kOut * kGroups; ++i) {
    scales.push_back(static_cast<std::byte>(i == 0 ? 0 : 118 + i));
  }
  SafetensorsWriter writer(
      folder / "model.safetensors",
      {{"model.w_blocks", "U8", {kExperts, kOut, kGroups, 16}},
       {"model.w_scales", "U8", {kExperts, kOut, kGroups}},
       {"model.b_blocks", "U8", {3}}});
  writer.write("model.w_blocks", blocks);
  writer.write("model.w_scales", scales);
  writer.write("model.b_blocks", std::span(blocks).first(3));
  writer.finish();

  const HfFolder read(folder.path(), "model.");
  EXPECT_THAT(read.names(), ElementsAre("model.b_blocks", "model.w"));
  const HfFolder::Found found = read.find("model.w");
  EXPECT_EQ(found.entry->dtype, "BF16");
  EXPECT_THAT(found.entry->shape, ElementsAre(kExperts, kIn, kOut));
  EXPECT_EQ(found.entry->nbytes(), 2U * kExperts * kIn * kOut);
  std::vector<std::uint16_t> values(kExperts * kIn * kOut);
  const auto bytes = std::as_writable_bytes(std::span(values));
  // Pieces that end inside one expert and start inside another.
  const std::size_t middle = 2U * kIn * kOut - 10;
  found.read(middle, bytes.subspan(middle));
  found.read(0, bytes.first(middle));
  constexpr float kNumbers[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (std::int64_t in = 0; in < kIn; ++in) {
      for (std::int64_t out = 0; out < kOut; ++out) {
        const std::int64_t group = (e * kOut + out) * kGroups + in / 32;
        const auto both =
            static_cast<unsigned>(blocks[group * 16 + in % 32 / 2]);
        const unsigned bits = in % 2 == 0 ? both & 15U : both / 16U;
        const float want = std::ldexp(
                               kNumbers[bits % 8],
                               static_cast<int>(scales[group]) - 127) *
                           (bits < 8 ? 1.0F : -1.0F);
        const float got = std::bit_cast<float>(
            std::uint32_t{values[(e * kIn + in) * kOut + out]} << 16U);
        EXPECT_EQ(got, want) << e << " " << in << " " << out;
        EXPECT_EQ(std::signbit(got), std::signbit(want));
      }
    }
  }
}

TEST(HfFolder, RefusesMxfp4OfOtherShapes) {
  const TempFolder folder;
  SafetensorsWriter writer(
      folder / "model.safetensors",
      {{"w_blocks", "U8", {1, 1, 1, 16}}, {"w_scales", "U8", {1, 1, 2}}});
  const std::vector<std::byte> bytes(16);
  writer.write("w_blocks", bytes);
  writer.write("w_scales", std::span(bytes).first(2));
  writer.finish();
  EXPECT_THAT(
      refused(folder.path()),
      HasSubstr(
          "tensor 'w': expected MXFP4 blocks [experts, out, in / 32, 16]"));
}

TEST(HfFolder, OtherFormsSayWhatToDo) {
  const std::pair<const char*, const char*> cases[] = {
      {"pytorch_model.bin", "pytorch_model.bin is not a safetensors file"},
      {"adapter_model.safetensors", "merge it into its base model"},
      {"model.fp16.safetensors", "model.fp16.safetensors is a variant"},
      {"weights.gguf", "weights.gguf is not a safetensors file"},
      {"notes.txt", "and no other weights"}};
  for (const auto& [name, says] : cases) {
    const TempFolder folder;
    folder.write(name, "");
    EXPECT_THAT(refused(folder.path()), HasSubstr(says)) << name;
  }
  EXPECT_THAT(refused("/no/such/folder"), HasSubstr("it is not a directory"));
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
      AllOf(HasSubstr("y.safetensors"), HasSubstr("but missing")));
  EXPECT_THAT(
      index(R"({"weight_map": {"b": "x.safetensors"}})"),
      HasSubstr("has no tensor 'b'"));
}

}  // namespace
}  // namespace flatshard
