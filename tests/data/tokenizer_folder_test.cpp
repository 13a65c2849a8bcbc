#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "flatshard/data/python_tokenizer.h"
#include "flatshard/data/text_codec.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

constexpr const char* kInterpreter = FLATSHARD_TEST_PYTHON;

#define NEEDS_THE_PACKAGE                                                      \
  if (std::system(                                                             \
          fmt::format("'{}' -c 'import tokenizers' 2>/dev/null", kInterpreter) \
              .c_str()) != 0) {                                                \
    GTEST_SKIP() << kInterpreter << " has no Python package 'tokenizers'";     \
  }

/// Returns a tokenizer as Llama 2 has it: words with a space before them, bytes
/// for what has no piece, and the first space of a text removed when it is
/// decoded. `state` are further members, such as the truncation.
std::string llama_json(const std::string& state = "") {
  std::string vocab = R"("<unk>": 0, "<s>": 1, "</s>": 2)";
  int id = 3;
  for (int byte = 0; byte < 256; ++byte) {
    vocab += fmt::format(R"(, "<0x{:02X}>": {})", byte, id++);
  }
  for (const char* piece :
       {"▁", "a", "b", "c", "▁a", "▁b", "▁c", "<", "/", "s", ">"}) {
    vocab += fmt::format(R"(, "{}": {})", piece, id++);
  }
  const auto special = [](int token, const char* text) {
    return fmt::format(
        R"({{"id": {}, "content": "{}", "special": true, "single_word": false,
         "lstrip": false, "rstrip": false, "normalized": false}})",
        token,
        text);
  };
  return "{" + state + R"("version": "1.0", "added_tokens": [)" +
         special(0, "<unk>") + "," + special(1, "<s>") + "," +
         special(2, "</s>") + R"(],
 "normalizer": {"type": "Sequence", "normalizers": [
   {"type": "Prepend", "prepend": "▁"},
   {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
 "decoder": {"type": "Sequence", "decoders": [
   {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
   {"type": "ByteFallback"}, {"type": "Fuse"},
   {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
 "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true,
   "byte_fallback": true, "vocab": {)" +
         vocab + R"(}, "merges": ["▁ a", "▁ b", "▁ c"]}})";
}

std::unique_ptr<TextCodec> codec_of(
    const TempFolder& temp,
    bool parse_special = false) {
  return TextCodec::hf_tokenizer(
      temp / "tokenizer.json",
      {2},
      {.python = kInterpreter, .parse_special = parse_special});
}

TEST(TokenizerFolder, GeneratedTextIsDecodedWithItsPrompt) {
  NEEDS_THE_PACKAGE;
  const TempFolder temp;
  temp.write("tokenizer.json", llama_json());
  const auto codec = codec_of(temp);
  const auto prompt = codec->encode("a b");
  const auto more = codec->encode("c a");
  // Apart from the prompt the first space is lost.
  EXPECT_EQ(codec->decode(more), "c a");
  EXPECT_EQ(codec->decode_after("a b", prompt, more), "a b c a");
  // A text that decodes otherwise stays as it was typed.
  EXPECT_EQ(
      codec->decode_after(" a b", codec->encode(" a b"), more),
      " a b c a");
  // The bytes of a character that has no piece.
  const auto bytes = codec->encode("é");
  ASSERT_EQ(bytes.size(), 3U);
  EXPECT_EQ(codec->decode_after("a", codec->encode("a"), bytes), "a é");
  EXPECT_EQ(codec->decode_after("", {2}, {bytes[1], bytes[2], 2}), "é");
  // An incomplete character does not remove text next to it, and the end of
  // another character does not change the prompt.
  EXPECT_EQ(
      codec->decode_after(
          "a",
          codec->encode("a"),
          {bytes[1], bytes[2], bytes[1]}),
      "aé\uFFFD");
  EXPECT_EQ(codec->decode_after("é", bytes, {bytes[2]}), "é\uFFFD");
}

TEST(TokenizerFolder, StateOfCallsInTheFileIsReset) {
  NEEDS_THE_PACKAGE;
  const TempFolder temp;
  temp.write(
      "tokenizer.json",
      llama_json(R"("truncation": {"direction": "Right", "max_length": 4,
        "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right",
        "pad_to_multiple_of": 8, "pad_id": 2, "pad_type_id": 0,
        "pad_token": "</s>"},)"));
  EXPECT_EQ(codec_of(temp)->encode("a b c a b c").size(), 6U);
}

TEST(TokenizerFolder, ControlTokensInTextAreText) {
  NEEDS_THE_PACKAGE;
  const TempFolder temp;
  temp.write("tokenizer.json", llama_json());
  EXPECT_EQ(codec_of(temp)->encode("a</s>").size(), 5U);
  EXPECT_EQ(codec_of(temp, true)->encode("a</s>").size(), 2U);
}

TEST(TokenizerFolder, NoModuleOfTheWorkingFolderIsImported) {
  NEEDS_THE_PACKAGE;
  const TempFolder temp;
  temp.write("tokenizer.json", llama_json());
  for (const char* name :
       {"tokenizers.py",
        "json.py",
        "flatshard.py",
        "struct.py",
        "sitecustomize.py",
        "encodings.py"}) {
    temp.write(name, "raise SystemExit('imported from the working folder')");
  }
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(temp.path());
  std::size_t count = 0;
  for (const std::string& path :
       {std::string(""),
        std::string(":/none"),
        std::string("/none:."),
        temp.path().string()}) {
    ::setenv("PYTHONPATH", path.c_str(), 1);
    count += codec_of(temp)->encode("a b").size();
  }
  ::unsetenv("PYTHONPATH");
  std::filesystem::current_path(here);
  EXPECT_EQ(count, 8U);
}

}  // namespace
}  // namespace flatshard::data
