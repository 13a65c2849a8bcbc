#include "flatshard/data/import_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/core/error.h"
#include "flatshard/data/token_source.h"
#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;
using Tokens = std::vector<std::int64_t>;

template <class T>
std::string words(const std::vector<T>& values) {
  return {
      reinterpret_cast<const char*>(values.data()),
      values.size() * sizeof(T)};
}

template <class T>
std::string llm_c(std::int32_t magic, const std::vector<T>& tokens) {
  std::vector<std::int32_t> header(256);
  header[0] = magic;
  header[1] = 1;
  header[2] = static_cast<std::int32_t>(tokens.size());
  return words(header) + words(tokens);
}

/// Returns an index of Megatron's for int32 tokens.
std::string megatron_index(
    const std::vector<std::int32_t>& sizes,
    const std::vector<std::int64_t>& documents,
    std::uint8_t dtype = 4) {
  std::vector<std::int64_t> pointers;
  std::int64_t at = 0;
  for (const std::int32_t size : sizes) {
    pointers.push_back(at);
    at += std::int64_t{4} * size;
  }
  return std::string("MMIDIDX\0\0", 9) + words<std::uint64_t>({1}) +
         words<std::uint8_t>({dtype}) +
         words<std::int64_t>(
             {static_cast<std::int64_t>(sizes.size()),
              static_cast<std::int64_t>(documents.size())}) +
         words(sizes) + words(pointers) + words(documents);
}

class ImportTokens : public ::testing::Test {
 protected:
  ImportTokens() {
    options_.output = temp_ / "out";
    options_.tokenizer = "none";
    options_.vocab_size = 100;
    options_.end_of_document = "9";
    options_.validation_fraction = 0;
    options_.force = true;
  }

  /// Returns the documents that `files` give, each with its end.
  std::vector<Tokens> import(std::vector<std::string> files) {
    for (std::string& file : files) {
      file = (temp_ / file).string();
    }
    options_.inputs = std::move(files);
    files_.clear();
    import_tokens(options_, &files_);
    return documents("train");
  }

  std::vector<Tokens> documents(const char* split) {
    const auto corpus = Corpus::open(options_.output, split);
    std::vector<Tokens> all;
    for (std::int64_t i = 0; i < corpus->num_documents(); ++i) {
      Tokens& tokens = all.emplace_back(static_cast<std::size_t>(
          corpus->document_begin(i + 1) - corpus->document_begin(i)));
      corpus->read(corpus->document_begin(i), tokens);
    }
    return all;
  }

  std::string problem(ErrorCode code, const std::string& file) {
    return error_message(code, [&] { import({file}); });
  }

  TempFolder temp_;
  ImportOptions options_;
  std::vector<std::string> files_;
};

TEST_F(ImportTokens, RawWordsOfNanoGpt) {
  temp_.write("train.bin", words<std::uint16_t>({1, 2, 9, 9, 3, 9, 4}));
  EXPECT_EQ(
      import({"train.bin"}),
      (std::vector<Tokens>{{1, 2, 9}, {3, 9}, {4, 9}}));
  EXPECT_EQ(files_[0], "train.bin: raw uint16, 7 tokens, 3 documents");
  EXPECT_EQ(CorpusMeta::load(options_.output).vocab_size, 100);
  options_.dtype = "uint32";
  temp_.write("wide.bin", words<std::uint32_t>({99, 9, 5}));
  EXPECT_EQ(import({"wide.bin"}), (std::vector<Tokens>{{99, 9}, {5, 9}}));
  EXPECT_THAT(
      problem(ErrorCode::format, "train.bin"),
      HasSubstr("expected a multiple of 4 bytes"));
}

TEST_F(ImportTokens, WideWordsAreNotTakenForNarrowOnes) {
  temp_.write(
      "wide.bin",
      words<std::uint32_t>({10, 20, 30, 40, 50, 60, 9, 70}));
  EXPECT_THAT(
      problem(ErrorCode::format, "wide.bin"),
      HasSubstr("as in tokens of 32 bits; name what they are with --dtype "
                "uint32"));
}

TEST_F(ImportTokens, WordsOf64BitsAreNotTakenForNarrowerOnes) {
  temp_.write("a.bin", words<std::int64_t>({10, 20, 9, 30}));
  for (const char* dtype : {"", "uint16", "uint32", "int32"}) {
    options_.dtype = dtype;
    EXPECT_THAT(
        problem(ErrorCode::format, "a.bin"),
        HasSubstr("as in tokens of 64 bits; name what they are with --dtype "
                  "int64"));
  }
  for (const char* dtype : {"int64", "uint64"}) {
    options_.dtype = dtype;
    EXPECT_EQ(import({"a.bin"}), (std::vector<Tokens>{{10, 20, 9}, {30, 9}}));
  }
  options_.dtype = "uint8";
  temp_.write("b.bin", words<std::uint8_t>({10, 20, 9}));
  EXPECT_EQ(import({"b.bin"}), (std::vector<Tokens>{{10, 20, 9}}));
  options_.dtype = "float32";
  EXPECT_THAT(
      problem(ErrorCode::config, "b.bin"),
      HasSubstr("--dtype: expected a type of integers such as uint16"));
}

/// Returns what numpy.save writes.
template <class T>
std::string numpy(
    const std::string& descr,
    const std::string& shape,
    const std::vector<T>& values,
    int version = 1,
    const char* fortran_order = "False") {
  std::string header = fmt::format(
      "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}",
      descr,
      fortran_order,
      shape);
  header.resize(117, ' ');
  header += '\n';
  std::string text = "\x93NUMPY";
  text += {static_cast<char>(version), '\0', static_cast<char>(header.size())};
  text += std::string(version == 1 ? 1 : 3, '\0');
  return text + header + words(values);
}

TEST_F(ImportTokens, ArraysOfNumPy) {
  const std::vector<Tokens> wanted{{1, 2, 9}, {3, 9}};
  temp_.write("0.npy", numpy<std::uint16_t>("'<u2'", "(4,)", {1, 2, 9, 3}));
  temp_.write("1.npy", numpy<std::uint8_t>("'|u1'", "(4,)", {1, 2, 9, 3}));
  temp_.write("2.npy", numpy<std::int32_t>("'<i4'", "(4,)", {1, 2, 9, 3}, 2));
  temp_.write("3.npy", numpy<std::int64_t>("'<i8'", "(4,)", {1, 2, 9, 3}, 3));
  temp_.write("4.npy", numpy<std::uint64_t>("'<u8'", "(4,)", {1, 2, 9, 3}));
  temp_.write("5.npy", numpy<std::int16_t>("'<i2'", "(2, 2)", {1, 2, 9, 3}));
  // The content decides, whatever the name and --dtype.
  temp_.write("6.bin", numpy<std::uint32_t>("'<u4'", "(4,)", {1, 2, 9, 3}));
  options_.dtype = "uint16";
  for (const char* file :
       {"0.npy", "1.npy", "2.npy", "3.npy", "4.npy", "5.npy", "6.bin"}) {
    EXPECT_EQ(import({file}), wanted) << file;
  }
  import({"5.npy"});
  EXPECT_EQ(files_[0], "5.npy: NumPy int16, 4 tokens, 2 documents");
}

TEST_F(ImportTokens, OtherArraysOfNumPyAreRefused) {
  const std::vector<std::uint16_t> values{1, 2, 9, 3};
  const auto refusal = [&](const std::string& content) {
    temp_.write("a.npy", content);
    return problem(ErrorCode::format, "a.npy");
  };
  for (const char* descr :
       {"'<f2'", "'>u2'", "'|b1'", "'|O'", "[('a', '<u2'), ('b', '<u2')]"}) {
    EXPECT_THAT(
        refusal(numpy(descr, "(4,)", values)),
        HasSubstr("a.npy: expected an array of little-endian integers, got "));
  }
  EXPECT_THAT(
      refusal(numpy("'<u2'", "(2, 2)", values, 1, "True")),
      HasSubstr("expected an array in C order, got (2, 2) in Fortran order"));
  EXPECT_THAT(
      refusal(numpy("'<u2'", "(3,)", values)),
      HasSubstr("for the 3 elements that the header of NumPy names, got"));
  EXPECT_THAT(
      refusal(numpy("'<u2'", "(5000000000, 5000000000)", values)),
      HasSubstr("expected an array of the shape (5000000000, 5000000000)"));
  EXPECT_THAT(
      refusal(numpy("'<u2'", "(0,)", values)),
      HasSubstr("for the 0 elements"));
  EXPECT_THAT(
      refusal(numpy("'<u2'", "(-4,)", values)),
      HasSubstr("expected a shape in NumPy's header, got (-4,)"));
  EXPECT_THAT(
      refusal(numpy("'<u2'", "(4,)", values).substr(0, 60)),
      HasSubstr("got version 1 and 118 bytes in a file of 60"));
  EXPECT_THAT(
      refusal(numpy("'<u2'", "(4,)", values, 4)),
      HasSubstr("got version 4"));
}

TEST_F(ImportTokens, FilesOfOtherFormatsAreRefused) {
  const std::string rest = words<std::uint16_t>({1, 2, 3, 4, 5, 6, 7, 8, 9});
  struct Case {
    const char* name;
    std::string begin;
    const char* what;
  };
  for (const auto& [name, begin, what] :
       {Case{"a.bin", "LITPKDS\1", "a packed file of litgpt"},
        Case{"a.npz", "PK\3\4", "a zip archive"},
        Case{"a.bin", "PAR1", "Parquet, which flatshard data prepare reads"},
        Case{"a.bin", std::string("MMIDIDX\0", 8), "the index of Megatron"},
        Case{"a.bin", "\x1f\x8b\x08", "gzip data"},
        Case{"a.pt", "\x80\x04\x95", "a pickle"},
        Case{"a.bin", "\x8a\xd8\x34\x01", "an evaluation of llm.c"},
        Case{"a.csv", "", "a table"}}) {
    temp_.write(name, begin + rest);
    for (const char* dtype : {"", "uint16"}) {
      options_.dtype = dtype;
      EXPECT_THAT(
          problem(ErrorCode::format, name),
          HasSubstr(fmt::format("{}: expected tokens, got {}", name, what)));
    }
  }
  temp_.write("a.bin", "1 2 3 9 4\n");
  options_.dtype = "";
  EXPECT_THAT(
      problem(ErrorCode::format, "a.bin"),
      HasSubstr("got text, which flatshard data prepare reads"));
  options_.dtype = "uint8";
  EXPECT_EQ(import({"a.bin"}).size(), 1U);
}

TEST_F(ImportTokens, HeadersOfLlmC) {
  // Documents begin with the token that ends one.
  temp_.write("a.bin", llm_c<std::uint16_t>(20240520, {9, 1, 2, 9, 3}));
  temp_.write("b.bin", llm_c<std::uint32_t>(20240801, {9, 70}));
  EXPECT_EQ(
      import({"*.bin"}),
      (std::vector<Tokens>{{1, 2, 9}, {3, 9}, {70, 9}}));
  EXPECT_EQ(files_[1], "b.bin: llm.c uint32, 2 tokens, 1 documents");
  std::string cut = llm_c<std::uint16_t>(20240520, {9, 1, 2});
  cut.pop_back();
  temp_.write("cut.bin", cut);
  EXPECT_THAT(
      problem(ErrorCode::format, "cut.bin"),
      HasSubstr("expected 1030 bytes for the 3 tokens that the header of llm.c "
                "names, got 1029"));
}

TEST_F(ImportTokens, DocumentsOfMegatronsIndex) {
  temp_.write("m.bin", words<std::int32_t>({1, 9, 2, 9, 3, 4, 5, 9}));
  // The file has three sequences. The first document is empty, and the last one
  // has an end within it.
  temp_.write("m.idx", megatron_index({2, 3, 3}, {0, 0, 1, 3}));
  EXPECT_EQ(import({"m*"}), (std::vector<Tokens>{{1, 9}, {2, 9, 3, 4, 5, 9}}));
  EXPECT_EQ(
      files_,
      (std::vector<std::string>{
          "m.bin: Megatron int32, 8 tokens, 2 documents"}));
  EXPECT_THAT(problem(ErrorCode::config, "m.idx"), HasSubstr("m.bin"));
  temp_.write("m.idx", megatron_index({2, 3, 2}, {0, 3}));
  EXPECT_THAT(
      problem(ErrorCode::format, "m.bin"),
      HasSubstr("expected 28 bytes for the 7 tokens"));
  temp_.write("m.idx", megatron_index({2, 3, 3}, {0, 2}));
  EXPECT_THAT(
      problem(ErrorCode::format, "m.bin"),
      HasSubstr("expected documents that have all 8 tokens"));
  temp_.write("m.idx", megatron_index({2, 3, 3}, {0, 3}, 6));
  EXPECT_THAT(
      problem(ErrorCode::format, "m.bin"),
      HasSubstr("got the dtype code 6"));
  temp_.write("m.idx", megatron_index({2, 3, 3}, {0, 3}).substr(0, 50));
  EXPECT_THAT(
      problem(ErrorCode::format, "m.bin"),
      HasSubstr("the index is cut off"));
}

TEST_F(ImportTokens, ASplitOfItsOwnOrPartOfTheDocuments) {
  temp_.write("train.bin", words<std::uint16_t>({1, 9, 2, 9, 3, 9, 4, 9}));
  temp_.write("val.bin", words<std::uint16_t>({5, 9}));
  options_.validation = {(temp_ / "val.bin").string()};
  EXPECT_EQ(import({"train.bin"}).size(), 4U);
  EXPECT_EQ(documents("validation"), (std::vector<Tokens>{{5, 9}}));
  options_.validation.clear();
  options_.validation_fraction = 0.01;
  EXPECT_EQ(import({"train.bin"}).size(), 3U);
  EXPECT_EQ(documents("validation").size(), 1U);
}

TEST_F(ImportTokens, TokensAreCheckedAgainstTheVocabulary) {
  temp_.write("train.bin", words<std::uint16_t>({1, 2, 100}));
  EXPECT_THAT(
      problem(ErrorCode::format, "train.bin"),
      HasSubstr("train.bin: expected raw uint16 tokens below the vocabulary's "
                "100, got 100 at place 2"));
  options_.end_of_document = "100";
  EXPECT_THAT(
      problem(ErrorCode::config, "train.bin"),
      HasSubstr("--end-of-document: expected the id of a token below the "
                "vocabulary's 100, got '100'"));
  options_.vocab_size = 0;
  EXPECT_THAT(
      problem(ErrorCode::config, "train.bin"),
      HasSubstr("--tokenizer: expected the tokenizer that the tokens are of"));
  for (const char* name : {"gpt2", "Qwen/Qwen3-8B"}) {
    options_.tokenizer = name;
    EXPECT_THAT(
        problem(ErrorCode::config, "train.bin"),
        HasSubstr(fmt::format("hf download {} --local-dir models/", name)));
  }
  options_.tokenizer = temp_ / "gpt2";
  EXPECT_THAT(
      problem(ErrorCode::config, "train.bin"),
      ::testing::Not(HasSubstr("hf download")));
}

}  // namespace
}  // namespace flatshard::data
