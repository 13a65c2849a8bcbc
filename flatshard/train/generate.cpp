#include "flatshard/train/generate.h"

#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/error.h"
#include "flatshard/data/text_codec.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/llama.h"
#include "flatshard/models/sample.h"
#include "flatshard/train/config.h"
#include "flatshard/train/setup.h"

#include <ATen/CPUGeneratorImpl.h>

namespace flatshard {

std::string generate_text(const GenerateOptions& options) {
  const at::NoGradGuard no_grad;
  const auto weights = options.run / "model.safetensors";
  FLATSHARD_CHECK(
      std::filesystem::exists(weights),
      io,
      "--run: expected {} with a model.safetensors; a run writes it when it "
      "ends",
      options.run.string());
  const Config config = load_config(options.run / "config.toml");
  const models::ModelConfig shape = model_config(config);
  const at::Device device = choose_device(options.device, {});
  models::Llama model(shape);
  const WeightsFile file(weights);
  nn::materialize(
      *model,
      device,
      parse_dtype(config.precision.compute, "precision.compute"),
      [&](const std::string& name, const InitSpec&, at::Tensor& parameter) {
        file.read(models::to_hf_name(name), parameter);
      });
  const std::string corpus =
      options.corpus.empty() ? tokenizer_corpus(config) : options.corpus;
  FLATSHARD_CHECK(
      !corpus.empty(),
      config,
      "the run was trained on random tokens; name a corpus folder whose "
      "tokenizer to use with --corpus");
  const auto codec = data::TextCodec::open(corpus);
  std::vector<std::int64_t> prompt = codec->encode(options.prompt);
  if (prompt.empty()) {
    prompt.push_back(codec->end_of_document());
  }
  const auto tokens = models::sample(
      [&](const at::Tensor& context) { return model(context); },
      prompt,
      device,
      at::detail::createCPUGenerator(static_cast<std::uint64_t>(options.seed)),
      {.max_new_tokens = options.max_new_tokens,
       .temperature = options.temperature,
       .top_k = options.top_k,
       .max_context = shape.max_seq_len,
       .stop_token = codec->end_of_document()});
  return options.prompt + codec->decode(tokens);
}

}  // namespace flatshard
