#include "flatshard/data/python_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "flatshard/data/prepare.h"
#include "flatshard/data/python_documents.h"
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

TEST(PythonTokenizer, PreparesTheSameCorpusAsItsOwnEncode) {
  const TempFolder temp;
  NEEDS_TOKENIZERS(temp.path());
  temp.write("in/a.txt", "the cat");
  temp.write("in/b.txt", "on the mat sat \xc3\xa9");
  const CorpusMeta meta = prepare_corpus(
      {.inputs = {(temp / "in/a.txt").string(), (temp / "in/b.txt").string()},
       .output = temp / "out",
       .tokenizer = (temp / "tokenizer.json").string(),
       .validation_fraction = 0,
       .python = kPython});
  EXPECT_EQ(meta.tokenizer, "tokenizer.json");
  EXPECT_EQ(meta.end_of_document, 0);
  EXPECT_GT(meta.vocab_size, 257);
  const auto corpus = Corpus::open(temp / "out");
  std::vector<std::int64_t> tokens(
      static_cast<std::size_t>(corpus->num_tokens()));
  corpus->read(0, tokens);

  const auto codec = TextCodec::open(temp / "out", {.python = kPython});
  EXPECT_EQ(codec->end_of_document(), 0);
  std::vector<std::int64_t> expected;
  for (const char* text : {"the cat", "on the mat sat \xc3\xa9"}) {
    const auto part = codec->encode(text);
    EXPECT_LT(part.size(), std::string_view(text).size());
    EXPECT_EQ(codec->decode(part), text);
    expected.insert(expected.end(), part.begin(), part.end());
    expected.push_back(0);
  }
  EXPECT_EQ(tokens, expected);
}

TEST(PythonTokenizer, NamedEndOfDocument) {
  const TempFolder temp;
  NEEDS_TOKENIZERS(temp.path());
  temp.write("a.txt", "the cat");
  PrepareOptions options{
      .inputs = {(temp / "a.txt").string()},
      .output = temp / "out",
      .tokenizer = (temp / "tokenizer.json").string(),
      .python = kPython,
      .end_of_document = "<|stop|>"};
  EXPECT_EQ(prepare_corpus(options).end_of_document, 1);
  options.output = temp / "other";
  options.end_of_document = "<none>";
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(options); }),
      HasSubstr("has no token <none>; name the token that ends a document "
                "with --end-of-document"));
  EXPECT_FALSE(std::filesystem::exists(temp / "other"));
}

TEST(PythonTokenizer, AFolderAndATokenBeforeEachDocument) {
  const TempFolder temp;
  NEEDS_TOKENIZERS(temp.path());
  temp.write("tokenizer_config.json", R"({"eos_token": "<|stop|>"})");
  temp.write("chat_template.jinja", "{{ messages }}");
  temp.write(
      "in/a.jsonl",
      "{\"text\": \"the cat\"}\n{\"text\": \"\"}\n{\"text\": \"sat\"}\n");
  PrepareOptions options{
      .inputs = {(temp / "in").string()},
      .output = temp / "out",
      .tokenizer = temp.path().string(),
      .validation_fraction = 0,
      .python = kPython,
      .begin_of_document = "<|endoftext|>"};
  const CorpusMeta meta = prepare_corpus(options);
  EXPECT_EQ(meta.end_of_document, 1);
  EXPECT_EQ(meta.begin_of_document, 0);
  EXPECT_EQ(CorpusMeta::load(temp / "out").begin_of_document, 0);
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}) {
    EXPECT_TRUE(std::filesystem::exists(temp / "out" / name)) << name;
  }
  const auto codec = TextCodec::open(temp / "out", {.python = kPython});
  std::vector<std::int64_t> expected;
  for (const char* text : {"the cat", "sat"}) {
    expected.push_back(0);
    const auto part = codec->encode(text);
    expected.insert(expected.end(), part.begin(), part.end());
    expected.push_back(1);
  }
  const auto corpus = Corpus::open(temp / "out");
  std::vector<std::int64_t> tokens(
      static_cast<std::size_t>(corpus->num_tokens()));
  corpus->read(0, tokens);
  EXPECT_EQ(tokens, expected);
  // A prompt begins as a document does.
  EXPECT_EQ(codec->begin_of_document(), 0);

  options.begin_of_document = "<none>";
  options.output = temp / "other";
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(options); }),
      HasSubstr("has no token <none>; name one that it has with "
                "--begin-of-document"));
}

TEST(PythonTokenizer, ParquetThroughPyarrow) {
  const TempFolder temp;
  if (run_python("") != 0) {
    GTEST_SKIP() << "no Python at " << kPython;
  }
  temp.write("in/a.parquet", "PAR1\none\n\ntwo\n");
  PrepareOptions options{
      .inputs = {(temp / "in").string()},
      .output = temp / "out",
      .validation_fraction = 0,
      .python = kPython};
  // The parts of pyarrow that the reader uses, for files that are lines of
  // text: a Python that has it, and one that has not.
  temp.write("with/pyarrow/__init__.py", "");
  temp.write(
      "with/pyarrow/parquet.py",
      "class ParquetFile:\n"
      "    def __init__(self, path):\n"
      "        self.rows = open(path).read().splitlines()[1:]\n"
      "        self.schema_arrow = self\n"
      "        self.names = ['id', 'text']\n"
      "    def iter_batches(self, columns):\n"
      "        assert columns == ['text']\n"
      "        yield self\n"
      "    def column(self, i):\n"
      "        return self\n"
      "    def to_pylist(self):\n"
      "        return [row or None for row in self.rows]\n");
  temp.write("without/pyarrow.py", "raise ImportError('none')\n");
  ::setenv("PYTHONPATH", (temp / "without").c_str(), 1);
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(options); }),
      ::testing::AllOf(
          HasSubstr("a .parquet file needs the Python package 'pyarrow'"),
          HasSubstr("-m pip install pyarrow"),
          HasSubstr("--python or FLATSHARD_PYTHON")));
  ::setenv("PYTHONPATH", (temp / "with").c_str(), 1);
  EXPECT_EQ(prepare_corpus(options).num_documents(), 2);
  const auto corpus = Corpus::open(temp / "out");
  std::vector<std::int64_t> tokens(8);
  corpus->read(0, tokens);
  EXPECT_EQ(
      tokens,
      (std::vector<std::int64_t>{'o', 'n', 'e', 256, 't', 'w', 'o', 256}));
  options.text_field = "body";
  options.output = temp / "other";
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(options); }),
      HasSubstr("expected the text field 'body', found id, text; name another "
                "with --text-field"));
  ::unsetenv("PYTHONPATH");
}

TEST(PythonTokenizer, BadTokenizerFile) {
  const TempFolder temp;
  NEEDS_TOKENIZERS(temp.path());
  temp.write("a.txt", "the cat");
  temp.write("bad.json", "{}");
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] {
            prepare_corpus(
                {.inputs = {(temp / "a.txt").string()},
                 .output = temp / "out",
                 .tokenizer = (temp / "bad.json").string(),
                 .python = kPython});
          }),
      HasSubstr("cannot load the tokenizer"));
}

TEST(PythonTokenizer, UnreadableFileIsNamed) {
  const TempFolder temp;
  NEEDS_TOKENIZERS(temp.path());
  const std::vector<InputFile> files{
      {.path = temp / "gone.txt", .name = "gone.txt", .nbytes = 1}};
  PythonDocuments documents(
      {.python = kPython, .tokenizer = temp / "tokenizer.json"},
      files,
      {});
  EXPECT_THAT(
      error_message(ErrorCode::io, [&] { documents.next_document(); }),
      ::testing::AllOf(HasSubstr("cannot read"), HasSubstr("gone.txt")));
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
