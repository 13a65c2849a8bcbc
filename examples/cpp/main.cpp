// A model of one's own, fully sharded: residual MLP blocks learn a function.
//   build-example/example                                       one rank
//   torchrun --no-python --nproc_per_node 2 build-example/example
#include <flatshard/flatshard.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <exception>
#include <string>
#include <vector>

namespace fs = flatshard;

class BlockImpl : public fs::nn::Module {
 public:
  explicit BlockImpl(std::int64_t dim)
      : up_(register_module("up", fs::nn::Linear(dim, 4 * dim, kInit))),
        down_(register_module("down", fs::nn::Linear(4 * dim, dim, kInit))) {}

  at::Tensor forward(const at::Tensor& x) {
    return down_(at::gelu(up_(x)), /*residual=*/x);
  }

 private:
  inline static const fs::nn::LinearOptions kInit{
      .bias = true,
      .init = fs::InitSpec::normal(0, 0.2F)};
  fs::nn::Linear up_, down_;
};
FLATSHARD_MODULE(Block);

class MlpImpl : public fs::nn::Module {
 public:
  MlpImpl(std::int64_t dim, int num_blocks) {
    for (int i = 0; i < num_blocks; ++i) {
      blocks_.push_back(
          register_module("block" + std::to_string(i), Block(dim)));
    }
  }

  at::Tensor forward(at::Tensor x, const at::Tensor& target) {
    for (const Block& block : blocks_) {
      x = block(x);
    }
    return at::mse_loss(x, target);
  }

  // Each block is gathered and released as a whole.
  std::vector<fs::nn::Module*> units() {
    std::vector<fs::nn::Module*> units;
    for (Block& block : blocks_) {
      units.push_back(block.get());
    }
    return units;
  }

 private:
  std::vector<Block> blocks_;
};
FLATSHARD_MODULE(Mlp);

int train() {
  const fs::RankEnvironment env = fs::rank_environment_from_env();
  const bool on_gpu = fs::num_cuda_devices() > env.local_rank;
  const at::Device device =
      on_gpu ? at::Device(at::kCUDA, env.local_rank) : at::Device(at::kCPU);
  fs::set_current_device(device);
  const auto mesh = env.world_size == 1 ? fs::Mesh::single(device)
                                        : fs::Mesh::create(
                                              {{"dp", env.world_size}},
                                              env.rank,
                                              fs::make_tcp_store(env),
                                              device);

  constexpr std::int64_t kDim = 8;
  Mlp model(kDim, 3);  // no memory yet
  const auto runtime = fs::fully_shard(
      *model,
      mesh,
      {.units = model->units(), .precision = fs::Precision::full()});
  fs::AdamW optimizer(runtime->groups(), {.weight_decay = 0.01});

  // Every rank draws batches of its own; the gradients are averaged.
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(1 + env.rank);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 200; ++step) {
    const at::Tensor x = at::randn({256, kDim}, random).to(device);
    const at::Tensor loss = model(x, at::sin(2 * x));
    loss.backward();
    const fs::ClipResult clip = fs::clip_grad_norm(runtime->groups(), 1.0);
    optimizer.step(/*lr=*/1e-2, clip.scale);
    optimizer.zero_grad();
    last = loss.item<double>();
    first = step == 0 ? last : first;
    if (env.rank == 0 && (step + 1) % 50 == 0) {
      fmt::print("step {:3}  loss {:.4f}\n", step + 1, last);
    }
  }
  if (env.rank == 0) {
    fmt::print(
        "loss of the first batch {:.4f}, of the last {:.4f}\n",
        first,
        last);
  }
  return last < 0.5 * first ? 0 : 1;
}

int main() {
  try {
    return train();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
