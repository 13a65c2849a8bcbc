#include "flatshard/data/prepare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/data/expect_error.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::HasSubstr;

/// Returns a split's documents as text, each without its end-of-document token.
std::vector<std::string> documents(
    const std::filesystem::path& folder,
    std::string_view split) {
  const auto corpus = Corpus::open(folder, split);
  std::vector<std::string> all;
  for (std::int64_t i = 0; i < corpus->num_documents(); ++i) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(
        corpus->document_begin(i + 1) - corpus->document_begin(i)));
    corpus->read(corpus->document_begin(i), tokens);
    EXPECT_EQ(tokens.back(), kByteEndOfDocument);
    std::string text;
    for (std::size_t j = 0; j + 1 < tokens.size(); ++j) {
      EXPECT_LT(tokens[j], 256);
      text.push_back(static_cast<char>(tokens[j]));
    }
    all.push_back(text);
  }
  return all;
}

TEST(Prepare, BytesRoundTrip) {
  const TempFolder temp;
  std::multiset<std::string> expected;
  for (int i = 0; i < 60; ++i) {
    const std::string text = fmt::format("text {} \xff\xfe\n", i) +
                             std::string(static_cast<std::size_t>(i * 7), 'x');
    temp.write(fmt::format("in/{}/{}.txt", i % 3, i), text);
    expected.insert(text);
  }
  temp.write("in/empty.txt", "");
  const CorpusMeta meta = prepare_corpus(
      {.inputs = {(temp / "in/**/*.txt").string()},
       .output = temp / "out",
       .validation_fraction = 0.25,
       .shard_tokens = 1000,
       .format = "bytes"});
  EXPECT_EQ(meta.vocab_size, 257);
  EXPECT_EQ(meta.end_of_document, 256);
  EXPECT_EQ(meta.token_type, TokenType::uint16);
  EXPECT_EQ(meta.num_documents(), 60);
  EXPECT_GT(meta.splits[0].shard_tokens.size(), 5U);

  const auto train = documents(temp / "out", "train");
  const auto validation = documents(temp / "out", "validation");
  std::multiset<std::string> all(train.begin(), train.end());
  all.insert(validation.begin(), validation.end());
  EXPECT_EQ(all, expected);
  // A quarter of 60, five standard deviations wide.
  EXPECT_NEAR(static_cast<double>(validation.size()), 15, 15);
  EXPECT_GE(validation.size(), 1U);
  EXPECT_EQ(CorpusMeta::load(temp / "out").to_json(), meta.to_json());
}

TEST(Prepare, SameInputSameFiles) {
  const TempFolder temp;
  for (int i = 0; i < 9; ++i) {
    temp.write(fmt::format("in/{}.txt", i), fmt::format("text {}", i));
  }
  const PrepareOptions options{
      .inputs = {(temp / "in").string()},
      .output = temp / "a"};
  PrepareOptions again = options;
  again.output = temp / "b";
  EXPECT_EQ(prepare_corpus(options).to_json(), prepare_corpus(again).to_json());
  EXPECT_EQ(
      documents(temp / "a", "validation"),
      documents(temp / "b", "validation"));
  temp.write("in/new.txt", "more");
  again.output = temp / "c";
  EXPECT_NE(
      prepare_corpus(again).input_hash,
      CorpusMeta::load(temp / "a").input_hash);
}

TEST(Prepare, TheSplitOfADocumentDependsOnItsNameAlone) {
  const TempFolder temp;
  const auto write = [&](int i) {
    temp.write(fmt::format("in/{}.txt", i), fmt::format("text {}", i));
  };
  for (int i = 0; i < 50; ++i) {
    write(i);
  }
  PrepareOptions options{
      .inputs = {(temp / "in").string()},
      .output = temp / "a",
      .validation_fraction = 0.3};
  prepare_corpus(options);
  for (int i = 50; i < 90; ++i) {
    write(i);
  }
  options.output = temp / "b";
  prepare_corpus(options);
  const auto before = documents(temp / "a", "validation");
  const auto after = documents(temp / "b", "validation");
  const std::set<std::string> wider(after.begin(), after.end());
  for (const std::string& text : before) {
    EXPECT_TRUE(wider.contains(text)) << text;
  }
  EXPECT_GT(after.size(), before.size());
}

TEST(Prepare, TwoDocumentsFillBothSplits) {
  for (const double fraction : {0.001, 0.999}) {
    const TempFolder temp;
    temp.write("in/a", "one");
    temp.write("in/b", "two");
    prepare_corpus(
        {.inputs = {(temp / "in").string()},
         .output = temp / "out",
         .validation_fraction = fraction});
    EXPECT_EQ(documents(temp / "out", "train").size(), 1U) << fraction;
    EXPECT_EQ(documents(temp / "out", "validation").size(), 1U) << fraction;
  }
}

TEST(Prepare, OneDocumentGivesItsEndToValidation) {
  const TempFolder temp;
  temp.write("book.txt", "0123456789abcdefghij");
  prepare_corpus(
      {.inputs = {(temp / "book.txt").string()},
       .output = temp / "out",
       .validation_fraction = 0.1});
  EXPECT_EQ(
      documents(temp / "out", "train"),
      (std::vector<std::string>{"0123456789abcdefgh"}));
  EXPECT_EQ(
      documents(temp / "out", "validation"),
      (std::vector<std::string>{"ij"}));
}

TEST(Prepare, FractionZeroMakesNoValidation) {
  const TempFolder temp;
  temp.write("a", "text");
  prepare_corpus(
      {.inputs = {(temp / "a").string()},
       .output = temp / "out",
       .validation_fraction = 0});
  EXPECT_EQ(documents(temp / "out", "train").size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(temp / "out/validation-00000.bin"));
}

TEST(Prepare, ErrorsLeaveNothingBehind) {
  const TempFolder temp;
  temp.write("in/a", "text");
  temp.write("in/b", "");
  const PrepareOptions good{
      .inputs = {(temp / "in").string()},
      .output = temp / "out"};
  const auto message = [&](ErrorCode code, auto change) {
    PrepareOptions options = good;
    change(options);
    const std::string text =
        error_message(code, [&] { prepare_corpus(options); });
    int entries = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator(temp.path())) {
      ++entries;
    }
    EXPECT_EQ(entries, 1) << text;
    return text;
  };
  EXPECT_THAT(
      message(ErrorCode::io, [](auto& o) { o.inputs = {"/none/*.txt"}; }),
      HasSubstr("--input '/none/*.txt' matches no file"));
  EXPECT_THAT(
      message(
          ErrorCode::format,
          [&](auto& o) { o.inputs = {(temp / "in/b").string()}; }),
      HasSubstr("none of 1 files has a document, so the corpus would be "
                "empty: b (empty)"));
  EXPECT_THAT(
      message(ErrorCode::config, [](auto& o) { o.validation_fraction = 1; }),
      HasSubstr("--validation-fraction: expected a number in [0, 1), got 1"));
  EXPECT_THAT(
      message(ErrorCode::config, [](auto& o) { o.shard_tokens = 0; }),
      HasSubstr("shard_tokens: expected at least 1"));
  EXPECT_THAT(
      message(ErrorCode::config, [](auto& o) { o.end_of_document = "</s>"; }),
      HasSubstr("--end-of-document belongs to a tokenizer.json"));
  EXPECT_THAT(
      message(ErrorCode::config, [](auto& o) { o.output = ""; }),
      HasSubstr("expected an output folder"));
  EXPECT_THAT(
      message(ErrorCode::config, [](auto& o) { o.tokenizer = "/none.json"; }),
      HasSubstr("expected \"bytes\", the path of a tokenizer.json or of a "
                "folder that has one, got '/none.json'"));
  EXPECT_THAT(
      message(
          ErrorCode::config,
          [&](auto& o) { o.tokenizer = (temp / "in").string(); }),
      HasSubstr("has no tokenizer.json; transformers writes one with"));
  EXPECT_THAT(
      message(ErrorCode::config, [](auto& o) { o.begin_of_document = "<s>"; }),
      HasSubstr("--begin-of-document belongs to a tokenizer.json"));
  EXPECT_THAT(
      message(ErrorCode::config, [](auto& o) { o.text_field = "body"; }),
      HasSubstr("--text-field belongs to files of rows"));
}

TEST(Prepare, BinaryFilesOfFoldersAreSkippedWithAWarning) {
  const TempFolder temp;
  temp.write("in/a.txt", "text");
  temp.write("in/module.pyc", "no NUL");
  for (int i = 0; i < 4; ++i) {
    temp.write(fmt::format("in/{}.png", i), std::string("\x89PNG\0", 5));
  }
  PrepareOptions options{
      .inputs = {(temp / "in").string()},
      .output = temp / "out",
      .validation_fraction = 0};
  ::testing::internal::CaptureStderr();
  prepare_corpus(options);
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("skipped 5 of the inputs: 0.png (binary), 1.png (binary), "));
  EXPECT_EQ(
      documents(temp / "out", "train"),
      (std::vector<std::string>{"text"}));
  // One that is named is an error, and can be wanted.
  options.inputs = {(temp / "in/0.png").string()};
  options.output = temp / "named";
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(options); }),
      ::testing::AllOf(HasSubstr("in/0.png"), HasSubstr("--format bytes")));
  options.format = "bytes";
  prepare_corpus(options);
  EXPECT_EQ(documents(temp / "named", "train")[0].size(), 5U);
  options.format = "auto";
  options.inputs = {(temp / "in/*.p*").string()};
  options.output = temp / "none";
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(options); }),
      HasSubstr("none of 5 files has a document"));
}

TEST(Prepare, EachLineOfJsonlIsADocument) {
  const TempFolder temp;
  temp.write(
      "in/a.jsonl",
      "{\"text\": \"one\", \"id\": 1}\n\n{\"text\": \"\"}\r\n"
      "{\"text\": null}\n{\"text\": \"tw\\u00f6\\n\"}");
  temp.write("in/b.txt", "three");
  temp.write("in/c.jsonl", "\n");
  PrepareOptions options{
      .inputs = {(temp / "in").string()},
      .output = temp / "out",
      .validation_fraction = 0};
  prepare_corpus(options);
  EXPECT_EQ(
      documents(temp / "out", "train"),
      (std::vector<std::string>{"one", "tw\u00f6\n", "three"}));
  // Rows are split by their names, as files are.
  options.output = temp / "split";
  options.validation_fraction = 0.01;
  prepare_corpus(options);
  EXPECT_EQ(documents(temp / "split", "train").size(), 2U);
  EXPECT_EQ(documents(temp / "split", "validation").size(), 1U);

  options.output = temp / "none";
  options.text_field = "id";
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(options); }),
      HasSubstr("a.jsonl:1: expected text in the field 'id', got a number"));
  options.text_field = "body";
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(options); }),
      HasSubstr("a.jsonl:1: expected the text field 'body', found text, id; "
                "name another with --text-field"));
  temp.write("in/a.jsonl", "{\"body\": \"a\"}\n[1]\n");
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(options); }),
      HasSubstr("a.jsonl:2: expected an object, got a list"));
  EXPECT_FALSE(std::filesystem::exists(temp / "none"));
}

TEST(Prepare, OneCorpusOfAllKindsAndASummary) {
  const TempFolder temp;
  using namespace std::string_literals;
  temp.write(
      "in/a.jsonl",
      "{\"text\": \"one\", \"score\": NaN}\n{\"text\": \"\"}");
  temp.write("in/b.JSON", "[{\"text\": \"two\"}]");
  temp.write("in/c.txt", "\xff\xfet\0h\0r\0e\0e\0"s);
  temp.write("in/README.md", "readme");
  temp.write("in/photo.png", "\x89PNG\0"s);
  std::filesystem::create_symlink("c.txt", temp / "in/d.txt");
  PrepareOptions options{
      .inputs = {(temp / "in").string()},
      .output = temp / "out",
      .validation_fraction = 0};
  Survey report;
  const CorpusMeta meta = prepare_corpus(options, &report);
  EXPECT_EQ(
      documents(temp / "out", "train"),
      (std::vector<std::string>{"one", "two", "three"}));
  EXPECT_EQ(
      report.describe_files(),
      "2 of rows (2 JSON, 0 Parquet), 1 of plain text, 1 links followed, 3 "
      "skipped");
  EXPECT_EQ(
      report.describe_skipped(),
      "README.md (beside the data), d.txt (a link to a file that is taken), "
      "photo.png (binary)");
  EXPECT_EQ(report.num_documents(), 3);
  EXPECT_EQ(report.num_empty, 1);
  EXPECT_EQ(report.nbytes, 11);
  // The same names and sizes, other texts.
  temp.write("in/b.JSON", "[{\"text\": \"owt\"}]");
  options.force = true;
  EXPECT_NE(prepare_corpus(options).input_hash, meta.input_hash);
}

TEST(Prepare, TextThatIsNoUtf8IsAnErrorOrReplaced) {
  const TempFolder temp;
  temp.write("a.txt", "line\ncaf\xe9");
  PrepareOptions options{
      .inputs = {(temp / "a.txt").string()},
      .output = temp / "out",
      .validation_fraction = 0};
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(options); }),
      HasSubstr("a.txt:2: expected UTF-8, got the byte 0xe9"));
  options.format = "text";
  ::testing::internal::CaptureStderr();
  prepare_corpus(options);
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("1 bytes that are not UTF-8 became U+FFFD"));
  EXPECT_EQ(
      documents(temp / "out", "train"),
      (std::vector<std::string>{"line\ncaf\uFFFD"}));
  options.tokenizer = "/none";
  options.format = "bytes";
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(options); }),
      HasSubstr("--format bytes: expected --tokenizer bytes"));
  options.tokenizer = "bytes";
  options.parse_special = true;
  EXPECT_THAT(
      error_message(ErrorCode::usage, [&] { prepare_corpus(options); }),
      HasSubstr("give --force"));
  options.force = true;
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(options); }),
      HasSubstr("--parse-special belongs to a tokenizer.json"));
}

TEST(Prepare, UnreadableFileIsNamed) {
  const TempFolder temp;
  temp.write("in/a", "text");
  temp.write("in/secret", "text");
  // Whatever the umask: only the one file is out of reach.
  for (const auto& open : {temp.path(), temp / "in", temp / "in/a"}) {
    std::filesystem::permissions(open, std::filesystem::perms::all);
  }
  std::filesystem::permissions(
      temp / "in/secret",
      std::filesystem::perms::none);
  // The permission bits do not stop root.
  const uid_t me = ::geteuid();
  ASSERT_EQ(::seteuid(me == 0 ? 65534 : me), 0);
  if (::euidaccess((temp / "in").c_str(), R_OK | X_OK) != 0) {
    ASSERT_EQ(::seteuid(me), 0);
    GTEST_SKIP() << "no other user reaches " << temp.path();
  }
  const std::string message = error_message(ErrorCode::io, [&] {
    prepare_corpus(
        {.inputs = {(temp / "in").string()}, .output = temp / "out"});
  });
  ASSERT_EQ(::seteuid(me), 0);
  EXPECT_THAT(message, HasSubstr("cannot read"));
  EXPECT_THAT(message, HasSubstr("in/secret: Permission denied"));
  EXPECT_FALSE(std::filesystem::exists(temp / "out"));
}

}  // namespace
}  // namespace flatshard::data
