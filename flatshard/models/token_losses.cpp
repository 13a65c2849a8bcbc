#include "flatshard/models/token_losses.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace flatshard::models {

at::Tensor token_losses(
    Llama& model,
    const at::Tensor& tokens,
    const at::Tensor& targets,
    const nn::Documents& documents) {
  constexpr std::int64_t kChunk = 1024;
  const at::NoGradGuard no_grad;
  at::Tensor x = model->embed(tokens);
  for (const LlamaBlock& block : model->blocks()) {
    x = block(x, documents);
  }
  const at::Tensor hidden = x.flatten(0, 1).unsqueeze(0);
  const at::Tensor wanted = targets.flatten();
  std::vector<at::Tensor> losses;
  for (std::int64_t begin = 0; begin < wanted.numel(); begin += kChunk) {
    const std::int64_t count = std::min(kChunk, wanted.numel() - begin);
    const at::Tensor logits =
        model->head(hidden.narrow(1, begin, count), /*targets=*/{})
            .select(0, 0)
            .to(at::kFloat);
    const at::Tensor of = wanted.narrow(0, begin, count);
    const at::Tensor loss =
        logits.logsumexp(-1) -
        logits.gather(1, of.clamp_min(0).unsqueeze(1)).squeeze(1);
    losses.push_back(loss.masked_fill(of.lt(0), 0.0));
  }
  return at::cat(losses).view(targets.sizes());
}

}  // namespace flatshard::models
