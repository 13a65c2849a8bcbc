#include "flatshard/data/python_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/text_codec.h"
#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;

constexpr const char* kPython = FLATSHARD_TEST_PYTHON;

#define NEEDS_TOKENIZERS                                                  \
  if (std::system(                                                        \
          fmt::format("'{}' -c 'import tokenizers' 2>/dev/null", kPython) \
              .c_str()) != 0) {                                           \
    GTEST_SKIP() << kPython << " has no Python package 'tokenizers'";     \
  }

/// Returns a tokenizer as Llama 2 has it: words with a space before them, bytes
/// for what has no piece, and the first space of a text removed when it is
/// decoded.
std::string llama_json() {
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
  return R"({"version": "1.0", "added_tokens": [)" + special(0, "<unk>") + "," +
         special(1, "<s>") + "," + special(2, "</s>") + R"(],
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
      {.python = kPython, .parse_special = parse_special});
}

TEST(FindPython, InOrder) {
  EXPECT_EQ(find_python("mine"), "mine");
  ::setenv("FLATSHARD_PYTHON", "from-environment", 1);
  EXPECT_EQ(find_python(""), "from-environment");
  ::unsetenv("FLATSHARD_PYTHON");
  const std::string found = find_python("");
  EXPECT_TRUE(found.ends_with(".venv/bin/python") || found == "python3")
      << found;
  // Next to the program, wherever it is started.
  const auto program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto here = std::filesystem::current_path();
  const TempFolder temp;
  std::filesystem::current_path(temp.path());
  if (!std::filesystem::exists(program / ".venv")) {
    std::filesystem::create_directories(program / ".venv/bin");
    std::ofstream(program / ".venv/bin/python") << "";
    EXPECT_EQ(find_python(""), (program / ".venv/bin/python").string());
    std::filesystem::remove_all(program / ".venv");
  }
  std::filesystem::current_path(here);
}

TEST(PythonTokenizer, EncodesAndDecodesWithTheTokenizerOfACorpus) {
  const TempFolder temp;
  NEEDS_TOKENIZERS;
  temp.write("tokenizer.json", llama_json());
  CorpusWriter writer(
      {.output = temp / "out",
       .tokenizer = temp / "tokenizer.json",
       .has_validation = false},
      {.vocab_size = 300,
       .end_of_document = 2,
       .begin_of_document = 1,
       .tokenizer = "tokenizer.json"});
  writer.begin_document(/*to_validation=*/false);
  writer.end_document(/*to_validation=*/false);
  writer.commit();
  const auto codec = TextCodec::open(temp / "out", {.python = kPython});
  EXPECT_EQ(codec->end_of_document(), 2);
  // A prompt starts as a document does.
  EXPECT_EQ(codec->begin_of_document(), 1);
  for (const char* text : {"a b", "c a b s \xc3\xa9"}) {
    const auto tokens = codec->encode(text);
    EXPECT_LE(tokens.size(), std::string_view(text).size());
    EXPECT_EQ(codec->decode(tokens), text);
  }
}

TEST(PythonTokenizer, AChildThatCannotStartIsAConfigError) {
  NEEDS_TOKENIZERS;
  const TempFolder temp;
  const auto tokenizer = temp.write("tokenizer.json", "{}");
  // An interpreter without site packages has no tokenizers.
  const auto bare = temp.write(
      "python",
      fmt::format("#!/bin/sh\nexec '{}' -S -I \"$@\"\n", kPython));
  std::filesystem::permissions(bare, std::filesystem::perms::owner_all);
  for (const auto& [python, text] :
       std::vector<std::pair<std::string, std::string>>{
           {kPython, "cannot load the tokenizer"},
           {bare.string(), "needs the Python package 'tokenizers'"},
           {"/none/python", "cannot start Python '/none/python'"},
           {"/bin/false", "Python '/bin/false' ended at once"}}) {
    const PythonTokenizerOptions options{
        .python = python,
        .tokenizer = tokenizer};
    EXPECT_THAT(
        error_message(
            ErrorCode::config,
            [&] { ask_python(options, "encode", {"text"}); }),
        HasSubstr(text));
  }
}

TEST(PythonTokenizer, GeneratedTextIsDecodedWithItsPrompt) {
  NEEDS_TOKENIZERS;
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

TEST(PythonTokenizer, ControlTokensInTextAreText) {
  NEEDS_TOKENIZERS;
  const TempFolder temp;
  temp.write("tokenizer.json", llama_json());
  EXPECT_EQ(codec_of(temp)->encode("a</s>").size(), 5U);
  EXPECT_EQ(codec_of(temp, true)->encode("a</s>").size(), 2U);
}

TEST(PythonTokenizer, NoModuleOfTheWorkingFolderIsImported) {
  NEEDS_TOKENIZERS;
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

TEST(TextCodec, Bytes) {
  const auto codec = TextCodec::bytes();
  const std::string text("a\0\xff z", 5);
  auto tokens = codec->encode(text);
  EXPECT_EQ(tokens, (std::vector<std::int64_t>{'a', 0, 255, ' ', 'z'}));
  tokens.push_back(codec->end_of_document());
  EXPECT_EQ(codec->decode(tokens), text);
}

}  // namespace
}  // namespace flatshard::data
