// Chats from JSON rows to a corpus with masks, and a sample of it shown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "flatshard/data/corpus.h"
#include "flatshard/data/prepare.h"
#include "flatshard/data/show_sample.h"
#include "flatshard/data/text_codec.h"
#include "tests/data/expect_error.h"
#include "tests/data/small_corpus.h"
#include "tests/support/temp_folder.h"

namespace flatshard::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kChatPython = FLATSHARD_TEST_PYTHON;

/// Writes a byte-level tokenizer with a chat template. @return false without
/// the packages.
bool write_chat_tokenizer(const TempFolder& temp) {
  const auto script = temp.write(
      "make.py",
      R"py(
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
import jinja2
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
special = ["<|end|>", "<|user|>", "<|assistant|>"]
vocab = {text: i for i, text in enumerate([*special, *letters])}
bpe = Tokenizer(models.BPE(vocab, []))
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
bpe.add_special_tokens(special)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bpe,
    eos_token="<|end|>",
    additional_special_tokens=special[1:],
)
tokenizer.chat_template = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
tokenizer.save_pretrained(sys.argv[1])
)py");
  return std::system(fmt::format(
                         "USE_TORCH=0 '{}' '{}' '{}' 2>/dev/null",
                         kChatPython,
                         script.string(),
                         (temp / "tokenizer").string())
                         .c_str()) == 0;
}

class Chat : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!write_chat_tokenizer(temp_)) {
      GTEST_SKIP() << kChatPython << " has no Python package 'transformers'";
    }
  }

  PrepareOptions options(const std::string& rows) const {
    return {
        .inputs = {temp_.write("chats.jsonl", rows).string()},
        .output = temp_ / "corpus",
        .tokenizer = (temp_ / "tokenizer").string(),
        .validation_fraction = 0,
        .force = true,
        .python = kChatPython,
        .chat = true};
  }

  const TempFolder temp_;
};

constexpr const char* kRows =
    R"({"messages": [{"role": "user", "content": "hi"}, )"
    R"({"role": "assistant", "content": "you"}]})"
    "\n\n"
    R"({"prompt": "say [x]", "completion": "[x]\nno"})"
    "\n";

TEST_F(Chat, AMaskLiesBesideTheTokens) {
  const CorpusMeta meta = prepare_corpus(options(kRows));
  // The template's end is the end of the document, and no other is added.
  EXPECT_EQ(meta.splits[0].num_tokens, 9 + 17);
  EXPECT_EQ(meta.splits[0].num_documents, 2);
  EXPECT_EQ(meta.splits[0].trained_tokens, (3 + 1) + (6 + 1));
  EXPECT_EQ(meta.end_of_document, 0);
  EXPECT_FALSE(meta.begin_of_document);
  const auto corpus = Corpus::open(temp_ / "corpus");
  std::vector<std::int64_t> tokens(9);
  std::vector<std::uint8_t> mask(9);
  corpus->read(0, tokens);
  corpus->read_mask(0, mask);
  EXPECT_EQ(tokens.back(), 0);
  EXPECT_EQ(corpus->document_begin(1), 9);
  EXPECT_EQ(mask, (std::vector<std::uint8_t>{0, 0, 0, 0, 0, 1, 1, 1, 1}));

  ShowOptions show{.packing = {.packing = Packing::documents, .seq_len = 30}};
  show.python = kChatPython;
  EXPECT_EQ(
      show_sample(temp_ / "corpus", show),
      "sample 0 of 1\n"
      "--- document 1: 17 tokens, 7 of them trained\n"
      "<|user|>say [x]<|end|><|assistant|>[[[x]\nno<|end|>]]\n"
      "--- document 2: 9 tokens, 4 of them trained\n"
      "<|user|>hi<|end|><|assistant|>[[you<|end|>]]\n"
      "--- 6 tokens of padding\n");
  show.colors = true;
  EXPECT_THAT(
      show_sample(temp_ / "corpus", show),
      HasSubstr("<|assistant|>\033[1;32myou<|end|>\033[0m\n"));
}

TEST_F(Chat, ErrorsNameFileAndLine) {
  const std::string file = (temp_ / "chats.jsonl").string();
  // In a list, the line of the row's beginning.
  EXPECT_THAT(
      error_message(
          ErrorCode::format,
          [&] {
            prepare_corpus(
                options("[{\"prompt\": \"a\", \"completion\": \"b\"},\n\n"
                        "{\"prompt\": \"a\"}]"));
          }),
      AllOf(
          HasSubstr(file + ":3: expected the field 'messages', or 'prompt'"),
          HasSubstr("found prompt")));
  EXPECT_FALSE(std::filesystem::exists(temp_ / "corpus"));
  PrepareOptions other = options(kRows);
  other.tokenizer = (temp_ / "tokenizer").string();
  std::filesystem::remove(temp_ / "tokenizer/chat_template.jinja");
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(other); }),
      HasSubstr("has no chat template"));
}

TEST_F(Chat, OptionsAndRowsSetVariablesOfTheTemplate) {
  temp_.write(
      "tokenizer/chat_template.jinja",
      "{{ style }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
      "<|end|>{% endfor %}");
  PrepareOptions good =
      options(R"({"prompt": "a", "completion": "b"})"
              "\n"
              R"({"prompt": "a", "completion": "b", )"
              R"("chat_template_kwargs": {"style": "of the row"}})");
  good.chat_template_kwargs = R"({"style": "brief"})";
  prepare_corpus(good);
  const std::string shown = show_sample(
      temp_ / "corpus",
      {.packing = {.packing = Packing::documents, .seq_len = 90},
       .python = kChatPython});
  EXPECT_THAT(shown, HasSubstr("\nbrief<|user|>a"));
  EXPECT_THAT(shown, HasSubstr("\nof the row<|user|>a"));
  good.chat_template_kwargs = "brief";
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(good); }),
      HasSubstr("expected JSON in --chat-template-kwargs"));
  good.chat = false;
  EXPECT_THAT(
      error_message(ErrorCode::config, [&] { prepare_corpus(good); }),
      HasSubstr("--chat-template-kwargs belongs to --chat"));
}

TEST(ChatOptions, AreChecked) {
  const TempFolder temp;
  temp.write("a.txt", "text");
  const PrepareOptions good{
      .inputs = {(temp / "a.txt").string()},
      .output = temp / "corpus",
      .tokenizer = temp.write("tokenizer.json", "{}").string(),
      .chat = true};
  const auto refusal = [&](auto&& change) {
    PrepareOptions options = good;
    change(options);
    return error_message(ErrorCode::config, [&] { prepare_corpus(options); });
  };
  EXPECT_THAT(
      refusal([](auto& o) { o.train_on = "some"; }),
      HasSubstr("--train-on: expected assistant, all or last, got some"));
  EXPECT_THAT(
      refusal([](auto& o) { o.chat = false, o.train_on = "all"; }),
      HasSubstr("--train-on belongs to --chat"));
  EXPECT_THAT(
      refusal([](auto& o) { o.tokenizer = "bytes"; }),
      HasSubstr("byte tokens have none"));
  EXPECT_THAT(
      refusal([](auto& o) { o.text_field = "x"; }),
      HasSubstr("--text-field does not go with --chat"));
  EXPECT_THAT(
      refusal([](auto& o) { o.format = "parquet"; }),
      HasSubstr("expected --format auto or json, got parquet"));
  EXPECT_THAT(
      error_message(ErrorCode::format, [&] { prepare_corpus(good); }),
      HasSubstr("a.txt: --chat takes JSON rows"));
}

TEST(ShowSample, OfAStreamOfBytes) {
  const TempFolder temp;
  temp.write("a.txt", "one\ttwo\x01");
  temp.write("b.txt", "three");
  prepare_corpus(
      {.inputs = {(temp / "*.txt").string()},
       .output = temp / "corpus",
       .validation_fraction = 0});
  ShowOptions show{.packing = {.packing = Packing::stream, .seq_len = 12}};
  EXPECT_EQ(
      show_sample(temp / "corpus", show),
      "sample 0 of 1\n"
      "--- document 1: 9 tokens, 8 of them trained\n"
      "o[[ne\ttwo\\x01<|endoftext|>]]\n"
      "--- document 2: 4 tokens, 4 of them trained\n"
      "[[thre]]\n");
  show.sample = 1;
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [&] { show_sample(temp / "corpus", show); }),
      HasSubstr("a sample in [0, 1) of --seq-len 12, got 1"));
}

TEST_F(Chat, AConversationBecomesAPromptThatTheAssistantAnswers) {
  const auto codec = TextCodec::hf_tokenizer(
      temp_ / "tokenizer/tokenizer.json",
      /*eos=*/{7},
      {.python = kChatPython});
  const ChatPrompts found = codec->chat_prompts(
      {R"({"messages": [{"role": "user", "content": "hi"}]})",
       R"({"messages": [{"role": "user", "content": "a"},
                        {"role": "assistant", "content": "b"},
                        {"role": "user", "content": "c"}]})"});
  ASSERT_EQ(found.prompts.size(), 2U);
  EXPECT_EQ(
      codec->decode(found.prompts[0], /*keep_special=*/true),
      "<|user|>hi<|end|><|assistant|>");
  EXPECT_EQ(
      codec->decode(found.prompts[1], /*keep_special=*/true),
      "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>");
  EXPECT_EQ(found.ends, (std::vector<std::int64_t>{0}));
  EXPECT_THAT(
      error_message(
          ErrorCode::format,
          [&] {
            codec->chat_prompts(
                {R"({"messages": [{"role": "user", "content": "a"},
                                  {"role": "assistant", "content": "b"}]})"});
          }),
      AllOf(
          HasSubstr("conversation 1: "),
          HasSubstr("a last message that the assistant answers")));
}

TEST(ChatPrompts, NeedATemplate) {
  EXPECT_THAT(
      error_message(
          ErrorCode::config,
          [] { TextCodec::bytes()->chat_prompts({"{}"}); }),
      HasSubstr("--chat: expected a tokenizer with a chat template"));
}

}  // namespace
}  // namespace flatshard::data
