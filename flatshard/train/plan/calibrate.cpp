// Measures one GPU except for matmuls, and calls the other measurements.
#include "flatshard/train/plan/calibrate.h"

#include "flatshard/device/device_name.h"
#include "flatshard/device/memory.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/nn/attention.h"
#include "flatshard/nn/loss.h"
#include "flatshard/nn/rope.h"
#include "flatshard/nn/swiglu.h"
#include "flatshard/ops/rms_norm_rows.h"
#include "flatshard/optim/flat_update.h"
#include "flatshard/train/metrics/peak_flops.h"
#include "flatshard/train/plan/call_timer.h"
#include "flatshard/train/setup/train_state.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>

namespace flatshard {
namespace {

constexpr double kGiga = 1e9;
constexpr double kTera = 1e12;
constexpr std::int64_t kElement = 2;  // bytes, of bfloat16
constexpr std::int64_t kCopyNbytes = std::int64_t{1} << 26;

at::TensorOptions bf16(at::Device device) {
  return at::TensorOptions(device).dtype(at::kBFloat16);
}

double nbytes_of(std::initializer_list<at::Tensor> tensors) {
  double sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += static_cast<double>(tensor.nbytes());
  }
  return sum;
}

}  // namespace

CalibrateOptions CalibrateOptions::for_gpus() {
  return {
      .products = {512, 1024, 2048, 4096, 8192, 16384},
      .float8 = {1024, 4096, 16384},
      .group_rows = {128, 512, 2048},
      .group_dims = {768, 2048, 4096},
      .seq_lens = {512, 1024, 2048, 4096, 8192, 16384, 32768},
      .tokens = 8192,
      .link_nbytes = std::int64_t{1} << 30,
      .seconds_per_point = 8e-3};
}

CalibrateOptions CalibrateOptions::for_cpus() {
  return {
      .products = {64, 256},
      .float8 = {},
      .group_rows = {16, 64},
      .group_dims = {64, 128},
      .seq_lens = {64, 128},
      .tokens = 256,
      .link_nbytes = std::int64_t{1} << 20,
      .seconds_per_point = 1e-3};
}

void calibrate_attention(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu) {
  const at::Device device = timer.device();
  const bool small = device.is_cpu();
  for (const std::int64_t head_dim : {64, 128}) {
    const std::int64_t heads = small ? 2 : 4096 / head_dim;
    const std::int64_t kv_heads = small ? 2 : heads / 4;
    plan::AttentionRates& rates = gpu.attention[head_dim];
    for (const std::int64_t seq : options.seq_lens) {
      const std::int64_t batch =
          std::max<std::int64_t>(1, options.tokens / seq);
      const auto input = [&](std::int64_t of_heads) {
        return normal_bf16(device, {batch, seq, of_heads, head_dim})
            .requires_grad_();
      };
      const at::Tensor q = input(heads);
      const at::Tensor k = input(kv_heads);
      const at::Tensor v = input(kv_heads);
      at::Tensor out;
      const double forward =
          timer([&] { out = nn::causal_attention(q, k, v); });
      const at::Tensor grad = at::randn_like(out);
      const double backward = timer([&] {
        torch::autograd::grad(
            {out},
            {q, k, v},
            {grad},
            /*retain_graph=*/true);
      });
      const auto flops = [&](bool of_backward) {
        return plan::attention_flops(
            of_backward,
            static_cast<double>(batch),
            static_cast<double>(heads),
            static_cast<double>(seq),
            static_cast<double>(head_dim));
      };
      rates.forward.sizes.push_back(static_cast<double>(seq));
      rates.forward.rates.push_back(flops(false) / forward / kTera);
      rates.backward.sizes.push_back(static_cast<double>(seq));
      rates.backward.rates.push_back(flops(true) / backward / kTera);
    }
  }
}

void calibrate_passes(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu) {
  const at::Device device = timer.device();
  const at::NoGradGuard no_grad;
  const std::int64_t tokens = options.tokens;
  const std::int64_t dim = device.is_cpu() ? 64 : 4096;
  const std::int64_t inner = 4 * dim;
  const auto rate = [&](const char* kind, double nbytes, auto&& call) {
    gpu.passes[kind] = nbytes / timer(call) / kGiga;
  };
  const at::Tensor x = normal_bf16(device, {tokens, dim});
  const at::Tensor wide = normal_bf16(device, {tokens, inner});
  const at::Tensor wide2 = normal_bf16(device, {tokens, inner});
  at::Tensor other = at::empty_like(wide);
  rate("copy", nbytes_of({wide, other}), [&] { other.copy_(wide); });
  // x, delta in; y, sum out.
  const at::Tensor ones = at::ones({dim}, bf16(device));
  const at::Tensor delta = normal_bf16(device, {tokens, dim});
  rate("norm", 4 * nbytes_of({x}), [&] {
    nn::rms_norm_rows(x, delta, ones, 1e-5);
  });
  rate("swiglu", 3 * nbytes_of({wide}), [&] { nn::swiglu(wide, wide2); });
  const std::int64_t head_dim = device.is_cpu() ? 32 : 128;
  const at::Tensor rotated = x.view({1, tokens, dim / head_dim, head_dim});
  const auto angles = at::TensorOptions(device).dtype(at::kFloat);
  const at::Tensor cos = at::randn({tokens, head_dim / 2}, angles);
  rate("rope", 2 * nbytes_of({x}), [&] { nn::rope(rotated, cos, cos); });
  rate("sum", 3 * nbytes_of({x}), [&] { at::add(x, delta); });
  const at::Tensor order =
      at::randperm(tokens, at::TensorOptions(device).dtype(at::kLong));
  rate("permute", 2 * nbytes_of({x}), [&] { x.index_select(0, order); });
  rate("quantize", 1.5 * nbytes_of({wide}), [&] {
    float8::quantize(wide, {.recipe = float8::Recipe::rowwise});
  });
  // The logits are the output of a matmul, then read and written once more.
  const std::int64_t vocab = device.is_cpu() ? 512 : 131072;
  const std::int64_t rows = std::min<std::int64_t>(tokens, 4096);
  const at::Tensor head = normal_bf16(device, {vocab, 16});
  const at::Tensor hidden = normal_bf16(device, {rows, 16}).requires_grad_();
  const at::Tensor targets =
      at::zeros({rows}, at::TensorOptions(device).dtype(at::kLong));
  const double product = timer([&] { at::mm(hidden.detach(), head.t()); });
  const double loss = timer([&] {
    const at::AutoGradMode grad(true);
    nn::linear_cross_entropy(hidden, head, targets);
  });
  const double logits = static_cast<double>(rows * vocab * kElement);
  gpu.passes["cross_entropy"] =
      2 * logits / std::max(loss - product, 0.1 * loss) / kGiga;
  // Main weights and two states read and written, a gradient read and a
  // compute weight written.
  const std::int64_t numel = tokens * dim;
  const auto flat = [&] { return at::randn({numel}, angles); };
  const FlatUpdate update{
      .main = flat(),
      .compute = at::empty({numel}, bf16(device)),
      .grad = at::zeros({numel}, bf16(device)),
      .state0 = flat(),
      .state1 = flat().abs_(),
      .rows = {AdamWStep{
          .lr = 1e-6F,
          .weight_decay = 0.1F,
          .beta1 = 0.9F,
          .beta2 = 0.95F,
          .eps = 1e-8F}
                   .row()}};
  rate(
      "optimizer",
      2 * nbytes_of({update.main, update.state0, update.state1}) +
          nbytes_of({update.grad, update.compute}),
      [&] { flat_update(Algorithm::adamw, update); });
  const auto local = at::TensorOptions(device).dtype(at::kByte);
  const at::Tensor from = at::zeros({kCopyNbytes}, local);
  const at::Tensor to = at::empty({kCopyNbytes}, local);
  rate("engine_copy", static_cast<double>(kCopyNbytes), [&] {
    copy_bytes(
        to.mutable_data_ptr(),
        from.const_data_ptr(),
        kCopyNbytes,
        device);
  });
  // A kernel that does next to nothing, after one that does much.
  const at::Tensor small = at::zeros({1}, angles);
  gpu.launch_us = 1e6 * timer([&] { small.zero_(); });
}

void calibrate_host(at::Device device, plan::Gpu& gpu) {
  constexpr std::int64_t kLayers = 16;
  constexpr int kRounds = 7;
  const Config config = resolve_config(
      parse_config(
          "[data]\ntrain = \"random\"\n[model]\ndim = 256\nlayers = 16\n"
          "heads = 4\nkv_heads = 2\nffn_dim = 512\nvocab_size = 512\n"
          "[training]\nseq_len = 64\n[precision]\ncompute = \"bfloat16\"\n",
          "calibration"),
      1);
  const models::ModelConfig model{
      .dim = 256,
      .layers = kLayers,
      .heads = 4,
      .kv_heads = 2,
      .head_dim = 64,
      .ffn_dim = 512,
      .vocab_size = 512,
      .max_seq_len = 64};
  TrainState state = make_train_state(config, model, Mesh::single(device), 1);
  const at::Tensor tokens =
      at::zeros({1, 64}, at::TensorOptions(device).dtype(at::kLong));
  using Clock = std::chrono::steady_clock;
  const auto host_us = [](auto&& call) {
    const auto begin = Clock::now();
    call();
    return std::chrono::duration<double, std::micro>(Clock::now() - begin)
        .count();
  };
  std::vector<double> forwards;
  std::vector<double> backwards;
  for (int round = 0; round < kRounds; ++round) {
    at::Tensor loss;
    forwards.push_back(host_us(
        [&] { loss = models::forward_loss(state.model, tokens, tokens); }));
    backwards.push_back(host_us([&] { loss.backward(); }));
    state.runtime->zero_grad();
    state.runtime->synchronize();
  }
  const auto median = [](std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
  };
  gpu.host_forward_us = median(forwards) / kLayers;
  gpu.host_backward_us = median(backwards) / kLayers;
  // A graph's launch is a small part of the launches that it replaces.
  constexpr double kOfForward = 0.2;
  gpu.host_graph_us = kOfForward * gpu.host_forward_us;
}

plan::Gpu calibrate(
    Mesh& mesh,
    const CalibrateOptions& options,
    const std::function<void(const std::string&)>& report) {
  const at::Device device = mesh.device();
  plan::Gpu gpu;
  gpu.name = device.is_cuda() ? cuda_device_name(device) : "CPU";
  gpu.source = fmt::format(
      "measured by flatshard plan --calibrate, torch {}, {} ranks",
      TORCH_VERSION,
      mesh.size());
  gpu.memory_gib = static_cast<double>(memory_stats(device).capacity_bytes) /
                   static_cast<double>(std::int64_t{1} << 30);
  report("the host");
  calibrate_host(device, gpu);
  report("memory-bound kernels");
  const CallTimer timer(device, options.seconds_per_point);
  calibrate_passes(timer, options, gpu);
  report("matmuls");
  calibrate_products(timer, options, gpu);
  report("attention");
  calibrate_attention(timer, options, gpu);
  report("FP8 matmuls");
  calibrate_float8(timer, options, gpu);
  report("copies from and to the host");
  calibrate_host_copies(mesh, options, gpu);
  const auto& rates = gpu.products.front().tflops;
  gpu.peak_bf16_tflops =
      (device.is_cuda() ? dense_bf16_flops(gpu.name) : std::nullopt)
          .value_or(*std::ranges::max_element(rates) * kTera) /
      kTera;
  if (mesh.size() > 1) {
    report("links");
    calibrate_links(mesh, options, gpu);
  }
  return gpu;
}

}  // namespace flatshard
