#include "flatshard/data/python_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "flatshard/data/corpus_writer.h"
#include "flatshard/data/text_codec.h"
#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;

constexpr const char* kPython = FLATSHARD_TEST_PYTHON;

int run_python(const std::string& code) {
  return std::system(
      fmt::format("'{}' -c \"{}\" 2>/dev/null", kPython, code).c_str());
}

/// Trains a byte-level BPE of 300 tokens in `folder`; false without the
/// package.
bool train_tokenizer(const std::filesystem::path& folder) {
  return run_python(fmt::format(
             "from tokenizers import Tokenizer, models, trainers, "
             "pre_tokenizers, decoders\n"
             "t = Tokenizer(models.BPE())\n"
             "t.pre_tokenizer = "
             "pre_tokenizers.ByteLevel(add_prefix_space=False)\n"
             "t.decoder = decoders.ByteLevel()\n"
             "t.train_from_iterator(['the cat sat on the mat'] * 9, "
             "trainers.BpeTrainer(vocab_size=300, "
             "special_tokens=['<|endoftext|>', '<|stop|>'], "
             "initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))\n"
             "t.save('{}/tokenizer.json')",
             folder.string())) == 0;
}

#define NEEDS_TOKENIZERS(folder)                                      \
  if (!train_tokenizer(folder)) {                                     \
    GTEST_SKIP() << kPython << " has no Python package 'tokenizers'"; \
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
  NEEDS_TOKENIZERS(temp.path());
  CorpusWriter writer(
      {.output = temp / "out",
       .tokenizer = temp / "tokenizer.json",
       .has_validation = false},
      {.vocab_size = 300,
       .end_of_document = 0,
       .begin_of_document = 1,
       .tokenizer = "tokenizer.json"});
  writer.begin_document(/*to_validation=*/false);
  writer.end_document(/*to_validation=*/false);
  writer.commit();
  const auto codec = TextCodec::open(temp / "out", {.python = kPython});
  EXPECT_EQ(codec->end_of_document(), 0);
  // A prompt starts as a document does.
  EXPECT_EQ(codec->begin_of_document(), 1);
  for (const char* text : {"the cat", "on the mat sat \xc3\xa9"}) {
    const auto tokens = codec->encode(text);
    EXPECT_LT(tokens.size(), std::string_view(text).size());
    EXPECT_EQ(codec->decode(tokens), text);
  }
}

TEST(PythonTokenizer, BadTokenizerFile) {
  const TempFolder temp;
  NEEDS_TOKENIZERS(temp.path());
  temp.write("bad.json", "{}");
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] {
            PythonChild(
                {.python = kPython, .tokenizer = temp / "bad.json"},
                "encode",
                "text");
          }),
      HasSubstr("cannot load the tokenizer"));
}

TEST(PythonTokenizer, MissingPackageSaysHowToGetIt) {
  const TempFolder temp;
  temp.write("tokenizer.json", "{}");
  // An interpreter without site packages has no tokenizers.
  const auto python = temp.write(
      "python",
      fmt::format("#!/bin/sh\nexec '{}' -S -I \"$@\"\n", kPython));
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  if (run_python("") != 0) {
    GTEST_SKIP() << "no Python at " << kPython;
  }
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] {
            PythonChild(
                {.python = python.string(),
                 .tokenizer = temp / "tokenizer.json"},
                "encode",
                "text");
          }),
      ::testing::AllOf(
          HasSubstr("needs the Python package 'tokenizers'"),
          HasSubstr("-m pip install tokenizers")));
}

TEST(PythonTokenizer, MissingInterpreter) {
  const TempFolder temp;
  temp.write("tokenizer.json", "{}");
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] {
            PythonChild(
                {.python = "/none/python",
                 .tokenizer = temp / "tokenizer.json"},
                "encode",
                "text");
          }),
      HasSubstr("cannot start Python '/none/python'"));
}

TEST(PythonTokenizer, AnInterpreterThatDies) {
  const TempFolder temp;
  temp.write("tokenizer.json", "{}");
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] {
            PythonChild(
                {.python = "/bin/false", .tokenizer = temp / "tokenizer.json"},
                "encode",
                "text");
          }),
      HasSubstr("Python '/bin/false' ended at once"));
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
