#include "flatshard/train/export/generate.h"

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/data/text_codec.h"
#include "flatshard/models/llama.h"
#include "flatshard/models/sample.h"
#include "flatshard/train/device.h"
#include "flatshard/train/export/stored_model.h"
#include "flatshard/train/option_errors.h"

#include <ATen/CPUGeneratorImpl.h>

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
      "the run was trained on random tokens; name a corpus folder whose "
      "tokenizer to use with --corpus");
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
  const at::NoGradGuard no_grad;
  // What is quick to find wrong comes before the weights.
  const StoredModel stored = open_model(options.run, options.step);
  const auto codec = open_codec(options, stored);
  const at::Device device = choose_device(options.device, {});
  models::Llama model = load_model(stored, device);
  if (stored.is_latest) {
    log_info("weights of {}", stored.what);
  }
  for (const std::string& text : prompts) {
    const std::vector<std::int64_t> prompt = tokens_of(text, *codec);
    const auto tokens = models::sample(
        [&](const at::Tensor& context) { return model(context); },
        prompt,
        device,
        at::detail::createCPUGenerator(
            static_cast<std::uint64_t>(options.seed)),
        {.max_new_tokens = options.max_new_tokens,
         .temperature = options.temperature,
         .top_k = options.top_k,
         .top_p = options.top_p,
         .max_context = stored.shape.max_seq_len,
         .stop_tokens = codec->stop_tokens()});
    got(codec->decode_after(text, prompt, tokens));
  }
}

}  // namespace flatshard
