// A model of one's own, fully sharded: residual blocks learn a function.
//   build-example/example                                       one rank
//   torchrun --no-python --nproc_per_node 2 build-example/example
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <flatshard/flatshard.h>

using namespace flatshard;

constexpr std::int64_t kDim = 8;

struct BlockImpl : nn::Module {
  nn::Linear up = register_module("up", nn::Linear(kDim, 4 * kDim));
  nn::Linear down = register_module("down", nn::Linear(4 * kDim, kDim));
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }
};
FLATSHARD_MODULE(Block);

struct MlpImpl : nn::Module {
  Block first = register_module("first", Block());
  Block second = register_module("second", Block());
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    return at::mse_loss(second(first(x)), target);
  }
};
FLATSHARD_MODULE(Mlp);

int main() {
  const RankEnvironment env = rank_environment_from_env();
  const at::Device device = num_cuda_devices() > env.local_rank
                                ? at::Device(at::kCUDA, env.local_rank)
                                : at::Device(at::kCPU);
  const auto axes = std::vector<MeshAxis>{{"dp", env.world_size}};
  const auto mesh =
      env.world_size == 1
          ? Mesh::single(device)
          : Mesh::create(axes, env.rank, make_tcp_store(env), device);

  Mlp model;  // no memory yet
  const auto runtime = fully_shard(
      *model,
      mesh,
      {.units = {model->first.get(), model->second.get()},  // gathered whole
       .precision = Precision::full()});
  AdamW optimizer(runtime->groups(), {.weight_decay = 0.01});

  // Every rank draws batches of its own; the gradients are averaged.
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(1 + env.rank);
  double begin = 0, loss_value = 0;
  for (int step = 0; step < 200; ++step) {
    const at::Tensor x = at::randn({256, kDim}, random).to(device);
    const at::Tensor loss = model(x, at::sin(2 * x));
    loss.backward();
    optimizer.step(/*lr=*/1e-2, clip_grad_norm(runtime->groups(), 1.0).scale);
    optimizer.zero_grad();
    loss_value = loss.item<double>();
    begin = step == 0 ? loss_value : begin;
  }
  fmt::print("rank {}: loss {:.4f} -> {:.4f}\n", env.rank, begin, loss_value);
  return loss_value < 0.5 * begin ? 0 : 1;
}
