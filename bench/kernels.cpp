// Measures the CUDA kernels on the shapes of Llama models: a line of JSON for
// each, with the bytes that it has to move at least. bench/kernels.py adds
// PyTorch's.
// usage: flatshard_kernels [tokens]
#include <limits>

#include "bench/gpu_calls.h"
#include "flatshard/comm/sum_rows.h"
#include "flatshard/nn/cuda_ops.h"
#include "flatshard/optim/flat_update.h"

namespace flatshard {
namespace {

struct Shape {
  const char* model;
  std::int64_t dim;
  std::int64_t ffn;
  std::int64_t heads;
  std::int64_t head_dim;
};
constexpr Shape kShapes[] = {
    {"1B", 2048, 8192, 32, 64},
    {"8B", 4096, 14336, 32, 128},
    {"70B", 8192, 28672, 64, 128}};
constexpr std::int64_t kVocab = 128256;
constexpr std::int64_t kLossRows = 2048;
constexpr std::int64_t kRanks = 8;

using Tensors = std::vector<at::Tensor>;
using Make = std::function<Tensors()>;
using Call = std::function<void(Tensors&)>;

// Makes so many tensors of random bfloat16.
Make normal(int count, std::vector<std::int64_t> shape) {
  return [=] {
    Tensors made;
    for (int i = 0; i < count; ++i) {
      made.push_back(at::randn(shape, kBf16));
    }
    return made;
  };
}

// The operations of one model.
struct Operations {
  const char* model;

  // `call` takes a set of tensors that `make` made. No round is skipped.
  void time(
      const char* op,
      std::int64_t nbytes,
      const Make& make,
      const Call& call) const {
    constexpr auto kAll = std::numeric_limits<std::int64_t>::max();
    auto sets = sets_of_arguments(nbytes, kAll, make);
    const auto num = static_cast<std::int64_t>(sets.size());
    const double us = call_microseconds(
        num,
        [&](auto i) { call(sets[i]); },
        0);
    JsonLine()
        .text("op", op)
        .text("model", model)
        .number("bytes", static_cast<double>(nbytes))
        .number("us", us, 2);
  }
};

void measure_layers(const Shape& s, std::int64_t tokens) {
  const Operations model{s.model};
  const std::int64_t hidden = tokens * s.dim * 2;
  const std::int64_t inner = tokens * s.ffn * 2;
  const std::int64_t heads = tokens * s.heads * s.head_dim * 2;
  const at::Tensor weight = at::ones({s.dim}, kBf16);
  const at::Tensor rstd = at::ones({tokens}, kFloat);
  const at::Tensor cos = at::randn({tokens, s.head_dim / 2}, kFloat);
  const auto rows = [&](int count) { return normal(count, {tokens, s.dim}); };
  model.time("add and rms_norm", 4 * hidden, rows(2), [&](auto& t) {
    nn::cuda::rms_norm_forward(t[0], t[1], weight, 1e-5);
  });
  model.time("rms_norm backward and add", 4 * hidden, rows(3), [&](auto& t) {
    nn::cuda::rms_norm_backward(t[0], t[1], t[2], weight, rstd, nullptr);
  });
  const std::int64_t head_rows = tokens * s.heads;
  const at::Tensor head_weight = at::ones({s.head_dim}, kBf16);
  const at::Tensor head_rstd = at::ones({head_rows}, kFloat);
  const auto head = [&](int count) {
    return normal(count, {head_rows, s.head_dim});
  };
  model.time("rms_norm of heads", 2 * heads, head(1), [&](auto& t) {
    nn::cuda::rms_norm_forward(t[0], {}, head_weight, 1e-6);
  });
  model.time("rms_norm of heads, backward", 3 * heads, head(2), [&](auto& t) {
    nn::cuda::rms_norm_backward(
        t[0],
        {},
        t[1],
        head_weight,
        head_rstd,
        nullptr);
  });
  const auto turned = normal(1, {1, tokens, s.heads, s.head_dim});
  model.time("rope", 2 * heads, turned, [&](auto& t) {
    nn::cuda::rope(t[0], t[0], cos, cos, false);
  });
  const auto wide = [&](int count) { return normal(count, {tokens, s.ffn}); };
  model.time("swiglu", 3 * inner, wide(2), [](auto& t) {
    nn::cuda::swiglu_forward(t[0], t[1]);
  });
  model.time("swiglu backward", 5 * inner, wide(3), [](auto& t) {
    nn::cuda::swiglu_backward(t[0], t[1], t[2], nullptr);
  });
}

void measure_loss() {
  const at::Tensor targets =
      at::randint(kVocab, {kLossRows}, kFloat.dtype(at::kLong));
  const at::Tensor scale = at::full({1}, 1.0 / kLossRows, kFloat);
  at::Tensor loss = at::empty({kLossRows}, kFloat);
  at::Tensor lse = at::empty({kLossRows}, kFloat);
  const nn::cuda::CrossEntropyArgs options{.write_gradient = true};
  Operations{"all"}.time(
      "cross-entropy and its gradient",
      2 * kLossRows * kVocab * 2,
      normal(1, {kLossRows, kVocab}),
      [&](auto& t) {
        nn::cuda::cross_entropy(t[0], targets, scale, loss, lse, options);
      });
}

void measure_shards() {
  const Operations shard{"shard"};
  const AdamWStep step{
      .lr = 1e-4F,
      .beta1 = 0.9F,
      .beta2 = 0.95F,
      .eps = 1e-8F,
      .bias_correction1 = 0.5F,
      .bias_correction2 = 0.5F};
  const at::Tensor scale = at::ones({}, kFloat);
  const auto states = [] {
    return Tensors{
        at::randn({kShard}, kFloat),
        at::empty({kShard}, kBf16),
        at::randn({kShard}, kBf16),
        at::zeros({kShard}, kFloat),
        at::zeros({kShard}, kFloat)};
  };
  const auto update = [&](auto& t) {
    adamw_update(
        {.main = t[0],
         .compute = t[1],
         .grad = t[2],
         .state0 = t[3],
         .state1 = t[4],
         .grad_scale = scale,
         .decay = {{kShard, 0.1F}}},
        step);
  };
  shard.time("AdamW and cast", kShard * (8 + 2 + 16 + 2), states, update);
  constexpr std::int64_t kPiece = kShard / kRanks;
  constexpr std::int64_t kNbytes = (kRanks + 1) * kPiece * 2;
  const auto pieces = [] {
    return Tensors{
        at::randn({kRanks, kPiece}, kBf16),
        at::empty({kPiece}, kBf16)};
  };
  shard.time("sum of copied gradients", kNbytes, pieces, [](auto& t) {
    sum_rows(t[1], t[0], ReduceOp::avg);
  });
}

}  // namespace
}  // namespace flatshard

int main(int, char** argv) {
  using namespace flatshard;
  return run_on_gpu("flatshard_kernels", argv[1], [](std::int64_t tokens) {
    for (const Shape& shape : kShapes) {
      measure_layers(shape, tokens);
    }
    measure_loss();
    measure_shards();
  });
}
