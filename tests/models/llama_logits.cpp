// Prints the answers of a model from a Hugging Face folder, for hf_parity.py.
//
// usage: llama_logits FOLDER TOKENS OUT DEVICE DTYPE [GRADIENTS]
//   FOLDER  config.json and files of weights
//   TOKENS  a text file with one sequence of token ids
//   OUT     a safetensors file with `logits`, float32 [seq, vocab], and
//           `continued`, the likeliest kContinued tokens after the sequence
//   DEVICE  cpu or cuda
//   DTYPE   float32 or bfloat16, of weights and activations
//   GRADIENTS  a safetensors file with `loss`, of every token but the first,
//              and the gradient of every parameter under its name
#include <ATen/ATen.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/format/safetensors.h"
#include "flatshard/models/generate.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/models/llama.h"
#include "flatshard/train/tools/stored_model.h"

namespace {

using namespace flatshard;

constexpr std::int64_t kContinued = 8;

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
  std::map<std::string, at::Tensor> by_name;
  std::set<const void*> seen;
  for (const nn::NamedParameter& p : nn::named_parameters(*model)) {
    const at::NoGradGuard no_grad;
    if (!seen.insert(p.tensor.unsafeGetTensorImpl()).second) {
      continue;  // a tied one, under its first name
    }
    std::int64_t done = 0;
    for (const StoredEntry& entry :
         models::hf_entries(model->config(), p.name, p.tensor.sizes().vec())) {
      at::Tensor& whole = by_name[entry.name];
      if (!whole.defined()) {
        whole = at::zeros(entry.tensor_shape(), p.tensor.grad().options());
      }
      whole.view({-1})
          .narrow(0, entry.begin(), entry.numel())
          .copy_(p.tensor.grad().reshape({-1}).narrow(0, done, entry.numel()));
      done += entry.numel();
    }
  }
  result.insert(result.end(), by_name.begin(), by_name.end());
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
  const StoredModel stored = open_model(folder, /*step=*/-1);
  models::Llama model(
      stored.shape,
      models::LlamaOptions{.plain_attention = true});
  nn::materialize(
      *model,
      device,
      arguments[4] == "bfloat16" ? at::kBFloat16 : at::kFloat,
      [&](const std::string& name, const InitSpec&, at::Tensor& parameter) {
        stored.read(name, parameter);
      });
  const at::Tensor tokens = read_tokens(arguments[1]).to(device);
  const at::Tensor logits = models::logits(model, tokens);
  const at::Tensor host = tokens.cpu();
  const std::vector<std::int64_t> prompt(
      host.const_data_ptr<std::int64_t>(),
      host.const_data_ptr<std::int64_t>() + host.numel());
  std::vector<std::int64_t> continued;
  models::generate(
      model,
      {prompt},
      {.max_new_tokens = kContinued, .sample = {.temperature = 0.0}},
      [&](std::size_t, const std::vector<std::int64_t>& added) {
        continued = added;
      });
  write_tensors(
      arguments[2],
      {{"logits", logits.squeeze(0)},
       {"continued", at::tensor(continued, at::kLong)}});
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
