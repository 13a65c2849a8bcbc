// How fast the CUDA kernels run on the shapes of Llama models: a line of JSON
// for each, with the bytes that it has to move at least. bench/kernels.py sets
// PyTorch's beside them.
// usage: flatshard_kernels [tokens]
#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "flatshard/comm/sum_rows.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"
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
constexpr std::int64_t kShard = std::int64_t{1} << 26;
constexpr std::int64_t kRanks = 8;
// Of arguments, so that none is still in a cache when its turn comes.
constexpr std::int64_t kWorkingSet = std::int64_t{1} << 30;

const at::TensorOptions kBf16 =
    at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
const at::TensorOptions kFloat = at::TensorOptions(at::kCUDA).dtype(at::kFloat);

// Median over rounds, of one call.
double microseconds(
    std::int64_t num_sets,
    const std::function<void(int)>& call) {
  const auto timer = make_stream_timer(at::Device(at::kCUDA, 0));
  constexpr int kCalls = 20;
  std::vector<double> rounds;
  for (int round = 0; round < 7; ++round) {
    timer->start();
    for (int i = 0; i < kCalls; ++i) {
      call(static_cast<int>(i % num_sets));
    }
    timer->stop();
    rounds.push_back(timer->wait_and_take_ms() * 1e3 / kCalls);
  }
  std::ranges::sort(rounds);
  return rounds[rounds.size() / 2];
}

// `call` takes a set of tensors that `make` made.
void measure(
    const char* op,
    const char* model,
    std::int64_t nbytes,
    const std::function<std::vector<at::Tensor>()>& make,
    const std::function<void(std::vector<at::Tensor>&)>& call) {
  const std::int64_t num_sets = std::max<std::int64_t>(1, kWorkingSet / nbytes);
  std::vector<std::vector<at::Tensor>> sets;
  for (std::int64_t i = 0; i < num_sets; ++i) {
    sets.push_back(make());
  }
  const double us = microseconds(num_sets, [&](int i) { call(sets[i]); });
  fmt::print(
      "{{\"op\": \"{}\", \"model\": \"{}\", \"bytes\": {}, \"us\": {:.2f}}}\n",
      op,
      model,
      nbytes,
      us);
  std::fflush(stdout);
}

void measure_layers(const Shape& s, std::int64_t tokens) {
  const auto rows = [&](std::int64_t width) {
    return at::randn({tokens, width}, kBf16);
  };
  const std::int64_t hidden = tokens * s.dim * 2;
  const std::int64_t inner = tokens * s.ffn * 2;
  const std::int64_t heads = tokens * s.heads * s.head_dim * 2;
  const at::Tensor weight = at::ones({s.dim}, kBf16);
  const at::Tensor rstd = at::ones({tokens}, kFloat);
  const at::Tensor cos = at::randn({tokens, s.head_dim / 2}, kFloat);
  measure(
      "add and rms_norm",
      s.model,
      4 * hidden,
      [&] {
        return std::vector{rows(s.dim), rows(s.dim)};
      },
      [&](auto& t) { nn::cuda::rms_norm_forward(t[0], t[1], weight, 1e-5); });
  measure(
      "rms_norm backward and add",
      s.model,
      4 * hidden,
      [&] {
        return std::vector{rows(s.dim), rows(s.dim), rows(s.dim)};
      },
      [&](auto& t) {
        nn::cuda::rms_norm_backward(t[0], t[1], t[2], weight, rstd, nullptr);
      });
  const std::int64_t head_rows = tokens * s.heads;
  const auto head = [&] { return at::randn({head_rows, s.head_dim}, kBf16); };
  const at::Tensor head_weight = at::ones({s.head_dim}, kBf16);
  const at::Tensor head_rstd = at::ones({head_rows}, kFloat);
  measure(
      "rms_norm of heads",
      s.model,
      2 * heads,
      [&] { return std::vector{head()}; },
      [&](auto& t) {
        nn::cuda::rms_norm_forward(t[0], {}, head_weight, 1e-6);
      });
  measure(
      "rms_norm of heads, backward",
      s.model,
      3 * heads,
      [&] {
        return std::vector{head(), head()};
      },
      [&](auto& t) {
        nn::cuda::rms_norm_backward(
            t[0],
            {},
            t[1],
            head_weight,
            head_rstd,
            nullptr);
      });
  measure(
      "rope",
      s.model,
      2 * heads,
      [&] {
        return std::vector{at::randn({1, tokens, s.heads, s.head_dim}, kBf16)};
      },
      [&](auto& t) { nn::cuda::rope(t[0], t[0], cos, cos, false); });
  measure(
      "swiglu",
      s.model,
      3 * inner,
      [&] {
        return std::vector{rows(s.ffn), rows(s.ffn)};
      },
      [&](auto& t) { nn::cuda::swiglu_forward(t[0], t[1]); });
  measure(
      "swiglu backward",
      s.model,
      5 * inner,
      [&] {
        return std::vector{rows(s.ffn), rows(s.ffn), rows(s.ffn)};
      },
      [&](auto& t) { nn::cuda::swiglu_backward(t[0], t[1], t[2], nullptr); });
}

void measure_loss() {
  const at::Tensor targets =
      at::randint(kVocab, {kLossRows}, kFloat.dtype(at::kLong));
  const at::Tensor scale = at::full({1}, 1.0 / kLossRows, kFloat);
  at::Tensor loss = at::empty({kLossRows}, kFloat);
  at::Tensor lse = at::empty({kLossRows}, kFloat);
  measure(
      "cross-entropy and its gradient",
      "all",
      2 * kLossRows * kVocab * 2,
      [&] {
        return std::vector{at::randn({kLossRows, kVocab}, kBf16)};
      },
      [&](auto& t) {
        nn::cuda::cross_entropy(
            t[0],
            targets,
            scale,
            loss,
            lse,
            {.write_gradient = true});
      });
}

void measure_shards() {
  const AdamWStep step{
      .lr = 1e-4F,
      .beta1 = 0.9F,
      .beta2 = 0.95F,
      .eps = 1e-8F,
      .bias_correction1 = 0.5F,
      .bias_correction2 = 0.5F};
  const at::Tensor scale = at::ones({}, kFloat);
  measure(
      "AdamW and cast",
      "shard",
      kShard * (8 + 2 + 16 + 2),
      [] {
        return std::vector{
            at::randn({kShard}, kFloat),
            at::empty({kShard}, kBf16),
            at::randn({kShard}, kBf16),
            at::zeros({kShard}, kFloat),
            at::zeros({kShard}, kFloat)};
      },
      [&](auto& t) {
        adamw_update(
            {.main = t[0],
             .compute = t[1],
             .grad = t[2],
             .state0 = t[3],
             .state1 = t[4],
             .grad_scale = scale,
             .decay = {{kShard, 0.1F}}},
            step);
      });
  constexpr std::int64_t kPiece = kShard / kRanks;
  measure(
      "sum of copied gradients",
      "shard",
      (kRanks + 1) * kPiece * 2,
      [] {
        return std::vector{
            at::randn({kRanks, kPiece}, kBf16),
            at::empty({kPiece}, kBf16)};
      },
      [](auto& t) { sum_rows(t[1], t[0], ReduceOp::avg); });
}

int run(std::int64_t tokens) {
  if (!cuda_available()) {
    fmt::print(stderr, "flatshard_kernels: expected a GPU, and found none\n");
    return 77;
  }
  for (const Shape& shape : kShapes) {
    measure_layers(shape, tokens);
  }
  measure_loss();
  measure_shards();
  return 0;
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::run(argc > 1 ? std::atoll(argv[1]) : 8192);
}
