// A transformer without experts that learns to predict the next token, fully
// sharded; docs/get_started/quickstart_cpp.md#a-transformer walks through it.
// It includes single headers: they compile faster than flatshard/flatshard.h.
//   build-example/transformer        one rank
//   build-example/transformer 2      two ranks on this host
#include <ATen/ATen.h>
#include <flatshard/comm/store.h>
#include <flatshard/device/stream.h>
#include <flatshard/fully_shard/fully_shard.h>
#include <flatshard/launch/environment.h>
#include <flatshard/launch/local_ranks.h>
#include <flatshard/mesh/mesh.h>
#include <flatshard/nn/attention.h>
#include <flatshard/nn/embedding.h>
#include <flatshard/nn/linear.h>
#include <flatshard/nn/loss.h>
#include <flatshard/nn/rms_norm.h>
#include <flatshard/nn/rope.h>
#include <flatshard/nn/swiglu.h>
#include <flatshard/optim/adamw.h>
#include <flatshard/optim/grad_norm.h>
#include <fmt/format.h>

using namespace flatshard;

constexpr std::int64_t kVocab = 64;
constexpr std::int64_t kDim = 32;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kSeq = 16;
constexpr int kBlocks = 2;
constexpr int kSteps = 100;

struct BlockImpl : nn::Module {
  nn::RmsNorm attn_norm = register_module("attn_norm", nn::RmsNorm(kDim));
  nn::Linear q = register_module("q", nn::Linear(kDim, kDim));
  nn::Linear k = register_module("k", nn::Linear(kDim, kDim));
  nn::Linear v = register_module("v", nn::Linear(kDim, kDim));
  nn::Linear out = register_module("out", nn::Linear(kDim, kDim));
  nn::RmsNorm mlp_norm = register_module("mlp_norm", nn::RmsNorm(kDim));
  nn::Linear gate = register_module("gate", nn::Linear(kDim, 4 * kDim));
  nn::Linear up = register_module("up", nn::Linear(kDim, 4 * kDim));
  nn::Linear down = register_module("down", nn::Linear(4 * kDim, kDim));

  at::Tensor
  attend(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    // [batch, seq, heads, head_dim]
    const auto heads = [](const at::Tensor& rows) {
      return rows.unflatten(-1, {kHeads, kDim / kHeads});
    };
    return out(nn::causal_attention(
        nn::rope(heads(q(x)), cos, sin),
        nn::rope(heads(k(x)), cos, sin),
        heads(v(x))));
  }
  at::Tensor
  forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const at::Tensor h = x + attend(attn_norm(x), cos, sin);
    const at::Tensor y = mlp_norm(h);
    return h + down(nn::swiglu(gate(y), up(y)));
  }
};
FLATSHARD_MODULE(Block);

struct TransformerImpl : nn::Module {
  nn::Embedding embed = register_module("embed", nn::Embedding(kVocab, kDim));
  std::vector<Block> blocks;
  nn::RmsNorm norm = register_module("norm", nn::RmsNorm(kDim));
  at::Tensor head =
      declare_parameter("head", {kVocab, kDim}, InitSpec::normal(0.0F, 0.02F));
  nn::RopeTable rope{{.head_dim = kDim / kHeads}};
  TransformerImpl() {
    for (int l = 0; l < kBlocks; ++l) {
      blocks.push_back(register_module("block" + std::to_string(l), Block()));
    }
  }
  // int64 [batch, seq] each -> the mean loss of a token
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    const auto [cos, sin] = rope.get(tokens.size(1), tokens.device());
    at::Tensor x = embed(tokens);
    for (Block& block : blocks) {
      x = block(x, cos, sin);
    }
    // The head's logits never exist in float32.
    return nn::linear_cross_entropy(norm(x), head, targets, {}, context());
  }
};
FLATSHARD_MODULE(Transformer);

int train() {
  const RankEnvironment env = rank_environment_from_env();
  const at::Device device = num_cuda_devices() > env.local_rank
                                ? at::Device(at::kCUDA, env.local_rank)
                                : at::Device(at::kCPU);
  const auto axes = std::vector<MeshAxis>{{"dp", env.world_size}};
  const auto mesh =
      env.world_size == 1
          ? Mesh::single(device)
          : Mesh::create(axes, env.rank, make_tcp_store(env), device);
  Transformer model;
  FullyShardOptions options{.group = {.precision = Precision::full()}};
  for (Block& block : model->blocks) {
    options.units.push_back(block.get());
  }
  const auto runtime = fully_shard(*model, mesh, options);
  AdamW optimizer(runtime->groups(), {.weight_decay = 0.1});

  at::manual_seed(env.rank);  // different data on each rank
  double first = 0;
  double last = 0;
  for (int step = 0; step < kSteps; ++step) {
    // Rows that count by 3 from a random token.
    const at::Tensor start = at::randint(kVocab, {8, 1}, at::kLong);
    const at::Tensor row =
        ((start + 3 * at::arange(kSeq + 1)) % kVocab).to(device);
    const at::Tensor loss =
        model(row.narrow(1, 0, kSeq), row.narrow(1, 1, kSeq));
    loss.backward();
    const GradNorm clip = grad_norm_and_scale(runtime->groups(), 1.0);
    optimizer.step(/*lr=*/1e-2, clip.scale);
    optimizer.zero_grad();
    last = loss.item<double>();
    first = step == 0 ? last : first;
  }
  if (env.rank == 0) {
    fmt::print("{} steps: loss {:.4f} -> {:.4f}\n", kSteps, first, last);
  }
  return last < first ? 0 : 1;
}

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv, argv + argc);
  try {
    if (argc == 2 && !launched_by_environment()) {
      return spawn_local_ranks(std::stoi(args[1]), args);
    }
    return train();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
