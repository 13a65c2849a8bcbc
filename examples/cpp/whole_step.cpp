// Forward and backward of a step as one CUDA graph;
// docs/guides/cuda_graphs.md#whole-steps.
//   build-example/whole_step
//   torchrun --no-python --nproc_per_node 2 build-example/whole_step
// Without a GPU a replay runs the recorded function again: for trying it.
#include <ATen/ATen.h>
#include <flatshard/flatshard.h>

using namespace flatshard;

constexpr std::int64_t kDim = 8;
constexpr std::int64_t kBatch = 64;
constexpr int kSteps = 100;

struct NetImpl : nn::Module {
  nn::Linear up = register_module("up", nn::Linear(kDim, 4 * kDim));
  nn::Linear down = register_module("down", nn::Linear(4 * kDim, kDim));
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    return at::mse_loss(down(at::gelu(up(x))), target);
  }
};
FLATSHARD_MODULE(Net);

void train() {
  const RankEnvironment env = rank_environment_from_env();
  const at::Device device = num_cuda_devices() > env.local_rank
                                ? at::Device(at::kCUDA, env.local_rank)
                                : at::Device(at::kCPU);
  const auto axes = std::vector<MeshAxis>{{"dp", env.world_size}};
  const auto mesh =
      env.world_size == 1
          ? Mesh::single(device)
          : Mesh::create(axes, env.rank, make_tcp_store(env), device);

  at::manual_seed(env.rank);  // every rank draws its own samples
  Net model;
  const auto runtime = fully_shard(
      *model,
      mesh,
      {.units = {model->up.get(), model->down.get()},
       .group = {.precision = Precision::full()},
       .runtime = {
           .graphs = {
               .enabled = true,
               .whole_step = true,
               .emulate_on_cpu = device.is_cpu()}}});
  AdamW optimizer(runtime->groups(), {});

  StepGraph step(runtime, [&](const nn::TensorList& in) {
    const at::Tensor loss = model(in[0], in[1]);
    loss.backward();
    return nn::TensorList{loss};
  });
  double first = 0;
  double last = 0;
  for (int i = 0; i < kSteps; ++i) {
    // Another tensor each time, since the graph has its own copies.
    const at::Tensor x =
        at::randn({kBatch, kDim}, at::TensorOptions(mesh->device()));
    const at::Tensor loss = step.run({x, at::sin(x)})[0];
    optimizer.step(
        /*lr=*/1e-2,
        grad_norm_and_scale(runtime->groups(), 1.0).scale);
    optimizer.zero_grad();
    last = loss.item<double>();
    first = i == 0 ? last : first;
  }
  if (mesh->rank() == 0) {
    fmt::print(
        "{} steps, {} of them replays: loss {:.5f} -> {:.5f}\n",
        kSteps,
        step.stats().step_replays,
        first,
        last);
  }
}

int main() {
  try {
    train();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
