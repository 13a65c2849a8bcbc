#include "flatshard/train/tools/generate_text.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/data/text_codec.h"
#include "flatshard/models/generate.h"
#include "flatshard/models/llama.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/setup/run_device.h"
#include "flatshard/train/tools/stored_model.h"

#include <algorithm>
#include <optional>

namespace flatshard {
namespace {

std::unique_ptr<data::TextCodec> open_codec(
    const GenerateOptions& options,
    const StoredModel& stored) {
  const data::CodecOptions codec{
      .python = options.python,
      .parse_special = options.parse_special};
  if (!options.corpus.empty()) {
    return for_option("--corpus", [&] {
      return data::TextCodec::open(options.corpus, codec);
    });
  }
  if (!stored.hf_folder.empty()) {
    return open_hf_codec(stored.hf_folder, codec);
  }
  FLATSHARD_CHECK(
      !stored.corpus.empty(),
      config,
      "the run was trained on random tokens; set --corpus to a dataset "
      "directory with the tokenizer to use");
  return for_option("data.train, or --corpus", [&] {
    return data::TextCodec::open(stored.corpus, codec);
  });
}

std::vector<std::int64_t> tokens_of(
    const std::string& text,
    data::TextCodec& codec) {
  std::vector<std::int64_t> tokens = codec.encode(text);
  if (const auto begin = codec.begin_of_document()) {
    tokens.insert(tokens.begin(), *begin);
  }
  if (tokens.empty()) {
    tokens.push_back(codec.end_of_document());
  }
  return tokens;
}

/// Tokenized prompts, and the conversion of generated tokens to text.
class PromptTexts {
 public:
  PromptTexts(
      const GenerateOptions& options,
      const std::vector<std::string>& prompts,
      data::TextCodec& codec)
      : codec_(codec), texts_(prompts), is_chat_(options.chat) {
    stop_tokens_ = codec.stop_tokens();
    if (!is_chat_) {
      for (const std::string& text : prompts) {
        tokens_.push_back(tokens_of(text, codec));
      }
      return;
    }
    data::ChatPrompts chats = codec.chat_prompts(prompts);
    tokens_ = std::move(chats.prompts);
    stop_tokens_.insert(
        stop_tokens_.end(),
        chats.ends.begin(),
        chats.ends.end());
  }

  const std::vector<std::vector<std::int64_t>>& tokens() const {
    return tokens_;
  }
  const std::vector<std::int64_t>& stop_tokens() const { return stop_tokens_; }

  void warn_of_long_ones(std::int64_t max_seq_len) const {
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (static_cast<std::int64_t>(tokens_[i].size()) > max_seq_len) {
        log_warning(
            "prompt {} has {} tokens, and the model reads its last {}",
            i + 1,
            tokens_[i].size(),
            max_seq_len);
      }
    }
  }

  std::string text(
      std::size_t prompt,
      const std::vector<std::int64_t>& generated) const {
    return is_chat_ ? codec_.decode(generated)
                    : codec_.decode_after(
                          texts_[prompt],
                          tokens_[prompt],
                          generated);
  }

 private:
  data::TextCodec& codec_;
  const std::vector<std::string>& texts_;
  const bool is_chat_;
  std::vector<std::vector<std::int64_t>> tokens_;
  std::vector<std::int64_t> stop_tokens_;
};

/// Hands texts over in the order of their prompts.
class InOrder {
 public:
  InOrder(std::size_t count, const std::function<void(const std::string&)>& got)
      : texts_(count), got_(got) {}

  void add(std::size_t prompt, std::string text) {
    texts_[prompt] = std::move(text);
    for (; next_ < texts_.size() && texts_[next_]; ++next_) {
      got_(*texts_[next_]);
    }
  }

 private:
  std::vector<std::optional<std::string>> texts_;
  const std::function<void(const std::string&)>& got_;
  std::size_t next_ = 0;
};

}  // namespace

std::string generate_text(const GenerateOptions& options) {
  std::string text;
  generate_texts(options, {options.prompt}, [&](const std::string& got) {
    text = got;
  });
  return text;
}

void generate_texts(
    const GenerateOptions& options,
    const std::vector<std::string>& prompts,
    const std::function<void(const std::string& text)>& got) {
  // Quick checks come before the weights.
  models::GenerationOptions generation{
      .max_new_tokens = options.max_new_tokens,
      .sample =
          {.temperature = options.temperature,
           .top_k = options.top_k,
           .top_p = options.top_p},
      .seed = static_cast<std::uint64_t>(options.seed),
      .batch_size = options.batch_size};
  generation.check();
  StoredModel stored = open_model(options.run, options.step);
  stored.use_dtype(options.dtype);
  const auto codec = open_codec(options, stored);
  const PromptTexts inputs(options, prompts, *codec);
  generation.stop_tokens = inputs.stop_tokens();
  inputs.warn_of_long_ones(stored.shape.max_seq_len);
  const models::Llama model =
      load_model(stored, choose_device(options.device, {}));
  if (stored.is_latest) {
    log_info("weights of {}", stored.what);
  }
  InOrder in_order(prompts.size(), got);
  models::generate(
      model,
      inputs.tokens(),
      generation,
      [&](std::size_t prompt, const std::vector<std::int64_t>& tokens) {
        in_order.add(prompt, inputs.text(prompt, tokens));
      });
}

}  // namespace flatshard
