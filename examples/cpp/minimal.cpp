// The smallest program that trains a sharded model. README.md quotes it.
//   torchrun --no-python --nproc_per_node 2 build-example/minimal
#include <flatshard/flatshard.h>

using namespace flatshard;

struct NetImpl : nn::Module {
  nn::Linear up = register_module("up", nn::Linear(64, 256));
  nn::Linear down = register_module("down", nn::Linear(256, 64));
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
};
FLATSHARD_MODULE(Net);

int main() {
  const RankEnvironment env = rank_environment_from_env();
  const auto store = make_tcp_store(env);
  const auto mesh =
      Mesh::create({{"dp", env.world_size}}, env.rank, store, at::kCPU);
  Net model;  // no memory yet
  const auto runtime = fully_shard(
      *model,
      mesh,
      {.strategy = "zero3", .group = {.precision = Precision::full()}});
  AdamW optimizer(runtime->groups(), {.weight_decay = 0.1});
  at::manual_seed(env.rank);  // different data on each rank
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = at::randn({32, 64});
    const at::Tensor loss = at::mse_loss(model(x), x);
    loss.backward();
    optimizer.step(/*lr=*/1e-2);
    optimizer.zero_grad();
    fmt::print("step {} loss {:.3f}\n", step, loss.item<double>());
  }
}
