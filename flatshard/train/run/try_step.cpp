#include "flatshard/train/run/try_step.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <optional>

#include "flatshard/core/error.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/group/float8_format.h"
#include "flatshard/models/llama.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"

namespace flatshard {
namespace {

constexpr std::int64_t kVocab = 64;
constexpr std::int64_t kSeq = 32;

models::ModelConfig tiny_model(bool experts) {
  models::ModelConfig config{
      .dim = 128,
      .layers = 2,
      .heads = 4,
      .kv_heads = 2,
      .ffn_dim = 256,
      .vocab_size = kVocab,
      .max_seq_len = kSeq};
  if (experts) {
    config.family = "mixtral";
    config.moe = {.num_experts = 4, .experts_per_token = 2};
  }
  return config;
}

}  // namespace

std::vector<std::string> step_kinds() {
  return {"bfloat16", "FP8 weights", "experts"};
}

double try_step(const std::shared_ptr<Mesh>& mesh, const std::string& kind) {
  models::Llama model(tiny_model(kind == "experts"));
  FullyShardOptions options{.seed = 1};
  for (const auto& unit : model->unit_modules()) {
    options.units.push_back(dynamic_cast<nn::Module*>(unit.get()));
  }
  if (kind == "FP8 weights") {
    const Float8Format format{
        .recipe = float8::Recipe::rowwise,
        .emulate = true};  // for GPUs without FP8 matmuls
    options.float8_of = [format](
                            const std::string& /*name*/,
                            const std::vector<std::int64_t>& shape) {
      return format.why_not(shape).empty() ? std::optional(format)
                                           : std::nullopt;
    };
  }
  const auto runtime = fully_shard(*model, mesh, options);
  AdamW optimizer(runtime->groups(), {});
  const at::Tensor tokens =
      at::randint(
          kVocab,
          {2, kSeq},
          at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{7}),
          at::kLong)
          .to(mesh->device());
  const at::Tensor targets = tokens.roll(1, 1);
  const at::Tensor loss = model(tokens, targets);
  loss.backward();
  const GradNorm norm = grad_norm_and_scale(runtime->groups(), 1.0);
  optimizer.step(/*lr=*/1e-2, norm.scale);
  optimizer.zero_grad();
  const double before = loss.item<double>();
  double after = 0;
  {
    const at::NoGradGuard no_grad;
    after = model(tokens, targets).item<double>();
  }
  runtime->synchronize();
  FLATSHARD_CHECK(
      std::isfinite(before) && after < before,
      internal,
      "a step of a tiny model ({}) on {}: expected a lower loss, got {} after "
      "{}",
      kind,
      mesh->device().str(),
      after,
      before);
  return before;
}

}  // namespace flatshard
