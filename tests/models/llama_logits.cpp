// What a Llama of a Hugging Face folder answers, for hf_parity.py.
//
// usage: llama_logits FOLDER TOKENS OUT DEVICE DTYPE [GRADIENTS]
//   FOLDER  config.json and model.safetensors
//   TOKENS  a text file with one sequence of token ids
//   OUT     a safetensors file with `logits`, float32 [seq, vocab]
//   DEVICE  cpu or cuda
//   DTYPE   float32 or bfloat16, of weights and activations
//   GRADIENTS  a safetensors file with `loss`, of every token but the first,
//              and the gradient of every parameter under its name
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/core/error.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/models/config.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/llama.h"

namespace {

using namespace flatshard;

at::Tensor read_tokens(const std::string& path) {
  std::ifstream in(path);
  const std::vector<std::int64_t> tokens{
      std::istream_iterator<std::int64_t>(in),
      std::istream_iterator<std::int64_t>()};
  FLATSHARD_CHECK(!tokens.empty(), io, "expected token ids in {}", path);
  return at::tensor(tokens, at::kLong).unsqueeze(0);
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

void write_tensors(const std::string& path, NamedTensors tensors) {
  std::vector<SafetensorsSpec> entries;
  for (auto& [name, tensor] : tensors) {
    tensor = tensor.detach().to(at::kCPU, at::kFloat).contiguous();
    entries.push_back({name, "F32", tensor.sizes().vec()});
  }
  SafetensorsWriter writer(path, entries);
  for (const auto& [name, tensor] : tensors) {
    writer.write(
        name,
        {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()});
  }
  writer.finish();
}

NamedTensors loss_and_gradients(
    models::Llama& model,
    const at::Tensor& tokens) {
  const at::AutoGradMode grad_mode(true);
  const std::int64_t seq = tokens.size(1) - 1;
  const at::Tensor loss = models::forward_loss(
      model,
      tokens.narrow(1, 0, seq),
      tokens.narrow(1, 1, seq));
  loss.backward();
  NamedTensors result{{"loss", loss}};
  for (const nn::NamedParameter& p : nn::named_parameters(*model)) {
    const void* mine = p.tensor.grad().const_data_ptr();
    const bool again =
        std::any_of(result.begin(), result.end(), [&](const auto& entry) {
          return entry.second.const_data_ptr() == mine;
        });
    if (again) {  // a tied one, under its first name
      continue;
    }
    std::int64_t done = 0;
    for (const StoredEntry& entry :
         models::hf_entries(model->config(), p.name, p.tensor.sizes().vec())) {
      result.emplace_back(
          entry.name,
          p.tensor.grad()
              .reshape({-1})
              .narrow(0, done, entry.numel())
              .view(entry.shape));
      done += entry.numel();
    }
  }
  return result;
}

void run(const std::vector<std::string>& arguments) {
  FLATSHARD_CHECK(
      arguments.size() == 5 || arguments.size() == 6,
      usage,
      "expected FOLDER TOKENS OUT DEVICE DTYPE [GRADIENTS], got {} arguments",
      arguments.size());
  const at::NoGradGuard no_grad;
  const std::filesystem::path folder = arguments[0];
  const at::Device device(arguments[3]);
  models::Llama model(models::from_hf_json(folder / "config.json"));
  const WeightsFile weights(folder / "model.safetensors");
  nn::materialize(
      *model,
      device,
      arguments[4] == "bfloat16" ? at::kBFloat16 : at::kFloat,
      [&](const std::string& name, const InitSpec&, at::Tensor& parameter) {
        std::int64_t done = 0;
        for (const StoredEntry& entry : models::hf_entries(
                 model->config(),
                 name,
                 parameter.sizes().vec())) {
          weights.read(
              entry.name,
              parameter.detach()
                  .view({-1})
                  .narrow(0, done, entry.numel())
                  .view(entry.shape));
          done += entry.numel();
        }
      });
  const at::Tensor tokens = read_tokens(arguments[1]).to(device);
  const at::Tensor logits = models::logits(model, tokens);
  write_tensors(arguments[2], {{"logits", logits.squeeze(0)}});
  if (arguments.size() == 6) {
    write_tensors(arguments[5], loss_and_gradients(model, tokens));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
