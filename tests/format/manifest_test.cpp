#include "flatshard/format/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "flatshard/core/error.h"

namespace flatshard {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Returns two files, three tensors: one in two pieces, one in one piece, one
/// empty. The pieces are split between columns.
Manifest example() {
  Manifest manifest;
  manifest.step = 7;
  manifest.mesh = "{dp: 2}";
  manifest.strategy = "zero3";
  manifest.files = {
      {"a.safetensors", 200, {0x1234}},
      {"b.safetensors", 100, {0x5678}}};
  auto& weights = manifest.tensors[std::string(kWeightRole)];
  weights["w"] = {
      .dtype = "F32",
      .shape = {4, 5},
      .pieces = {
          {{{0, 0}, {4, 3}}, 0, 100, "w[0:4, 0:3]"},
          {{{0, 3}, {4, 2}}, 1, 60, "w[0:4, 3:5]"}}};
  weights["empty"] = {.dtype = "BF16", .shape = {3, 0}, .pieces = {}};
  manifest.tensors["exp_avg"]["w"] = {
      .dtype = "BF16",
      .shape = {4, 5},
      .pieces = {{{{0, 0}, {4, 5}}, 0, 150, "exp_avg/w"}}};
  manifest.updates = {{"w", 7}, {"empty", 7}};
  manifest.state = {{"loader", "{}"}, {"config", "[run]\nseed = 1\n"}};
  return manifest;
}

/// Returns the error of parsing the example after `change`.
std::string refused(const std::function<void(json&)>& change) {
  json text = json::parse(to_json(example()));
  change(text);
  try {
    parse_manifest(text.dump(), "x/manifest.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::format) << error.what();
    EXPECT_THAT(error.message(), HasSubstr("x/manifest.json"));
    return error.message();
  }
  return "no error";
}

TEST(Manifest, GoesThereAndBack) {
  EXPECT_EQ(parse_manifest(to_json(example()), "x"), example());
  EXPECT_EQ(parse_manifest(to_json(Manifest{}), "x"), Manifest{});
}

TEST(Manifest, RefusesAnotherVersion) {
  EXPECT_THAT(
      refused([](json& m) { m["version"] = 3; }),
      HasSubstr("expected a version from 1 to 2, got 3"));
  EXPECT_THAT(
      refused([](json& m) { m["version"] = 0; }),
      HasSubstr("expected a version from 1 to 2, got 0"));
  EXPECT_THAT(
      refused([](json& m) { m["format"] = "zip"; }),
      HasSubstr("expected \"flatshard checkpoint\", got \"zip\""));
}

TEST(Manifest, RefusesFilesOutsideItsFolder) {
  for (const char* name : {"../a", "/etc/passwd", "a/b", "..", ".", ""}) {
    EXPECT_THAT(
        refused([&](json& m) { m["files"][0]["name"] = name; }),
        HasSubstr("expected the name of a file in the same folder"))
        << name;
  }
  EXPECT_THAT(
      refused([](json& m) { m["files"][1]["name"] = "a.safetensors"; }),
      HasSubstr("expected every file once"));
}

TEST(Manifest, RefusesPiecesOutsideTheirFile) {
  const auto piece = [](json& m) -> json& {
    return m["tensors"]["weight"]["w"]["pieces"][1];
  };
  EXPECT_THAT(
      refused([&](json& m) {
        piece(m)["bytes"] = {90, 122};
      }),
      HasSubstr("expected a range in the 100 bytes of b.safetensors"));
  EXPECT_THAT(
      refused([&](json& m) { piece(m)["file"] = 2; }),
      HasSubstr("an index below 2"));
  EXPECT_THAT(
      refused([&](json& m) {
        piece(m)["bytes"] = {60, 91};
      }),
      HasSubstr("expected 4 bytes for each of 8 elements"));
  EXPECT_THAT(
      refused([&](json& m) {
        piece(m)["bytes"] = {92, 60};
      }),
      HasSubstr("begin <= end"));
}

TEST(Manifest, RefusesGapsAndOverlaps) {
  const auto pieces = [](json& m) -> json& {
    return m["tensors"]["weight"]["w"]["pieces"];
  };
  EXPECT_THAT(
      refused([&](json& m) { pieces(m).erase(1); }),
      HasSubstr("expected pieces of all 20 elements, got 12 of them"));
  EXPECT_THAT(
      refused([&](json& m) {
        pieces(m)[1]["start"] = {0, 2};
      }),
      HasSubstr("expected pieces without a common element, got [0:4, 0:3] and "
                "[0:4, 2:4]"));
  // The boxes have as many elements as the tensor, one of them twice.
  EXPECT_THAT(
      refused([&](json& m) {
        pieces(m)[1]["start"] = {2, 0};
        pieces(m)[1]["length"] = {2, 4};
      }),
      HasSubstr("without a common element, got [0:4, 0:3] and [2:4, 0:4]"));
  EXPECT_THAT(
      refused([&](json& m) {
        m["tensors"]["exp_avg"]["w"]["pieces"][0]["bytes"] = {140, 180};
      }),
      AllOf(
          HasSubstr("exp_avg of w"),
          HasSubstr("weight of w"),
          HasSubstr("overlap in a.safetensors")));
}

TEST(Manifest, RefusesBoxesOutsideTheirTensor) {
  const auto piece = [](json& m) -> json& {
    return m["tensors"]["weight"]["w"]["pieces"][1];
  };
  const char* text = "expected start and length of a box in shape [4, 5]";
  EXPECT_THAT(
      refused([&](json& m) {
        piece(m)["start"] = {0, 4};
      }),
      HasSubstr(text));
  EXPECT_THAT(
      refused([&](json& m) {
        piece(m)["length"] = {5, 2};
      }),
      HasSubstr(text));
  EXPECT_THAT(
      refused([&](json& m) {
        piece(m)["length"] = {1LL << 62, 1LL << 62};
      }),
      HasSubstr(text));
  EXPECT_THAT(
      refused([&](json& m) { piece(m)["start"] = json::array({0}); }),
      HasSubstr(text));
  EXPECT_THAT(
      refused([&](json& m) { piece(m).erase("length"); }),
      HasSubstr("the key 'length' is missing"));
}

/// Returns the example's weight as version 1 has it: runs of the flattened
/// tensor.
json version_1() {
  json text = json::parse(to_json(example()));
  text["version"] = 1;
  text["tensors"]["weight"]["w"]["pieces"] = json::parse(R"([
    {"elements": [0, 12], "file": 0, "bytes": [100, 148], "entry": "w[0:12]"},
    {"elements": [12, 20], "file": 1, "bytes": [60, 92], "entry": "w[12:20]"}
  ])");
  text["tensors"]["exp_avg"]["w"]["pieces"] = json::parse(R"([
    {"elements": [0, 20], "file": 0, "bytes": [150, 190], "entry": "exp_avg/w"}
  ])");
  return text;
}

TEST(Manifest, ReadsVersion1) {
  const Manifest read = parse_manifest(version_1().dump(), "x");
  Manifest expected = example();
  expected.tensors["weight"]["w"].pieces = {
      {{{0, 0}, {2, 5}}, 0, 100, "w[0:12]"},
      {{{2, 0}, {1, 2}}, 0, 140, "w[0:12]"},
      {{{2, 2}, {1, 3}}, 1, 60, "w[12:20]"},
      {{{3, 0}, {1, 5}}, 1, 72, "w[12:20]"}};
  EXPECT_EQ(read, expected);
  // From then on it is a version 2.
  EXPECT_EQ(parse_manifest(to_json(read), "x"), read);

  json beyond = version_1();
  beyond["tensors"]["weight"]["w"]["pieces"][1]["elements"] = {12, 21};
  try {
    parse_manifest(beyond.dump(), "x");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("expected elements of 20"));
  }
}

TEST(Manifest, RefusesWrongTypesAndMissingKeys) {
  EXPECT_THAT(
      refused([](json& m) { m.erase("tensors"); }),
      HasSubstr("the key 'tensors' is missing"));
  EXPECT_THAT(
      refused([](json& m) { m["step"] = -1; }),
      HasSubstr("step: expected an integer from 0 to 2^62, got -1"));
  EXPECT_THAT(
      refused([](json& m) { m["files"][0]["digests"] = "00"; }),
      HasSubstr("hexadecimal"));
  EXPECT_THAT(
      refused([](json& m) { m["files"][0]["nbytes"] = 3000000; }),
      HasSubstr("expected 3 digests for 3000000 bytes, got 1"));
  EXPECT_THAT(
      refused([](json& m) { m["tensors"]["weight"]["w"]["dtype"] = "F31"; }),
      HasSubstr("F31"));
  EXPECT_THAT(
      refused([](json& m) {
        m["tensors"]["weight"]["w"]["shape"] = {1LL << 40, 1LL << 40};
      }),
      HasSubstr("fits 63 bits"));
  EXPECT_THAT(
      refused([](json& m) {
        m["tensors"]["weight"]["empty"]["shape"] =
            std::vector<std::int64_t>(100, 1);
      }),
      HasSubstr("expected at most 64 dimensions"));
  EXPECT_THAT(
      refused([](json& m) { m["state"]["loader"] = 3; }),
      HasSubstr("state: loader: expected a text, got 3"));
}

// Damage of any kind is an error or another manifest, never a crash.
TEST(Manifest, SurvivesRandomDamage) {
  const std::string good = to_json(example());
  std::mt19937_64 random(1);
  int num_refused = 0;
  constexpr int kRounds = 20000;
  for (int i = 0; i < kRounds; ++i) {
    std::string bad = good;
    for (int n = static_cast<int>(random() % 3) + 1; n > 0; --n) {
      const std::size_t at = random() % bad.size();
      switch (random() % 3) {
        case 0:
          bad[at] = static_cast<char>(random());
          break;
        case 1:
          bad.erase(at, random() % 20);
          break;
        default:
          bad.insert(at, bad.substr(random() % bad.size(), random() % 20));
      }
    }
    try {
      parse_manifest(bad, "x");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::format);
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, kRounds / 2);
}

TEST(Manifest, MergesWhatRanksWrote) {
  const Manifest whole = example();
  Manifest first = whole;
  first.files = {whole.files[0]};
  first.tensors["weight"]["w"].pieces.pop_back();
  Manifest second;
  second.files = {whole.files[1]};
  second.tensors["weight"]["w"] = whole.tensors.at("weight").at("w");
  auto& pieces = second.tensors["weight"]["w"].pieces;
  pieces.erase(pieces.begin());
  pieces[0].file = 0;
  EXPECT_EQ(merge_manifests({first, second}), whole);
  // A part survives the way through text though it leaves gaps.
  EXPECT_EQ(parse_manifest(to_json(second), "x", false), second);
  EXPECT_THROW(parse_manifest(to_json(second), "x"), Error);
  EXPECT_THROW(merge_manifests({first}), Error);
  second.tensors["weight"]["w"].shape = {5, 4};
  EXPECT_THROW(merge_manifests({first, second}), Error);
}

}  // namespace
}  // namespace flatshard
