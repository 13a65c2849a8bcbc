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

}  // namespace

std::string generate_text(const GenerateOptions& options) {
  const at::NoGradGuard no_grad;
  const StoredModel stored = open_model(options.run, options.step);
  // What is quick to find wrong comes before the weights.
  const auto codec = open_codec(options, stored);
  std::vector<std::int64_t> prompt = codec->encode(options.prompt);
  if (const auto begin = codec->begin_of_document()) {
    prompt.insert(prompt.begin(), *begin);
  }
  if (prompt.empty()) {
    prompt.push_back(codec->end_of_document());
  }
  const at::Device device = choose_device(options.device, {});
  // Without a backward plain operations cost little memory.
  models::Llama model(
      stored.shape,
      models::LlamaOptions{.plain_attention = true});
  nn::materialize(
      *model,
      device,
      stored.compute,
      [&](const std::string& name, const InitSpec&, at::Tensor& parameter) {
        stored.read(name, parameter);
      });
  for (const models::RouterOf& of : model->routers()) {
    of.router->make_bias(device);
    if (of.router->bias().defined()) {
      stored.read(of.bias_name(), of.router->bias());
    }
  }
  if (stored.is_latest) {
    log_info("weights of {}", stored.what);
  }
  const auto tokens = models::sample(
      [&](const at::Tensor& context) { return model(context); },
      prompt,
      device,
      at::detail::createCPUGenerator(static_cast<std::uint64_t>(options.seed)),
      {.max_new_tokens = options.max_new_tokens,
       .temperature = options.temperature,
       .top_k = options.top_k,
       .max_context = stored.shape.max_seq_len,
       .stop_tokens = codec->stop_tokens()});
  return codec->decode_after(options.prompt, prompt, tokens);
}

}  // namespace flatshard
