// Chats as prompts, and samples of datasets shown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "flatshard/data/byte_tokens.h"
#include "flatshard/data/corpus_writer.h"
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

  const TempFolder temp_;
};

TEST(ShowSample, MarksWhatIsTrained) {
  const TempFolder temp;
  CorpusWriter writer(
      {.output = temp / "corpus", .has_validation = false, .masked = true},
      {.vocab_size = kByteVocabSize,
       .end_of_document = kByteEndOfDocument,
       .tokenizer = "bytes"});
  for (const std::string text : {"ask:no", "ask longer:yes"}) {
    writer.begin_document(/*to_validation=*/false);
    const std::vector<std::uint32_t> tokens(text.begin(), text.end());
    std::vector<std::uint8_t> mask(text.size(), 0);
    std::fill(mask.begin() + text.find(':') + 1, mask.end(), 1);
    writer.append(/*to_validation=*/false, tokens, mask);
    writer.end_document(/*to_validation=*/false);
  }
  writer.commit();
  ShowOptions show{.packing = {.packing = Packing::documents, .seq_len = 26}};
  EXPECT_EQ(
      show_sample(temp / "corpus", show),
      "sample 0 of 1\n"
      "--- document 1: 15 tokens, 4 of them trained\n"
      "ask longer:[[yes<|endoftext|>]]\n"
      "--- document 2: 7 tokens, 3 of them trained\n"
      "ask:[[no<|endoftext|>]]\n"
      "--- 6 tokens of padding\n");
  show.colors = true;
  EXPECT_THAT(
      show_sample(temp / "corpus", show),
      HasSubstr("ask:\033[1;32mno<|endoftext|>\033[0m\n"));
}

TEST(ShowSample, OfAStreamOfBytes) {
  const TempFolder temp;
  write_byte_corpus(temp / "corpus", {"one\ttwo\x01", "three"}, 0);
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
