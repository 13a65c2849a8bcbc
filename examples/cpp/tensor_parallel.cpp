// A custom module whose layers two ranks share, with data parallelism.
// docs/guides/tensor_parallel.md walks through it.
//   build-example/tensor_parallel 1     one rank, unsharded layers
//   build-example/tensor_parallel 4     two pairs share layers: the same losses
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <flatshard/flatshard.h>

using namespace flatshard;

constexpr std::int64_t kDim = 16;
constexpr std::int64_t kSeq = 32;
constexpr int kSamples = 8;  // of a step, on all ranks together

struct BlockImpl : nn::Module {
  nn::RmsNorm norm = register_module("norm", nn::RmsNorm(kDim));
  nn::Linear up = register_module("up", nn::Linear(kDim, 64));
  nn::Linear down = register_module("down", nn::Linear(64, kDim));
  at::Tensor forward(const at::Tensor& x) {
    return x + down(at::gelu(up(norm(x))));
  }
};
FLATSHARD_MODULE(Block);

struct NetImpl : nn::Module {
  Block first = register_module("first", Block());
  Block second = register_module("second", Block());
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
};
FLATSHARD_MODULE(Net);

int train() {
  const RankEnvironment env = rank_environment_from_env();
  const int tp = env.world_size % 2 == 0 ? 2 : 1;
  // Adjacent ranks share layers, and read the same samples.
  const auto axes = std::vector<MeshAxis>{
      {"dp", env.world_size / tp},
      {"tp", tp, AxisRole::model}};
  const auto mesh = Mesh::create(
      axes,
      env.rank,
      env.world_size > 1 ? make_tcp_store(env) : StoreHandle(),
      at::kCPU);

  Net model;
  FullyShardOptions options{.group = {.precision = Precision::full()}};
  options.units = {model->first.get(), model->second.get()};
  options.placement_of = tensor_parallel(
      *model,
      *mesh,
      {{"up", nn::LinearCut::column}, {"down", nn::LinearCut::row}});
  const auto runtime = fully_shard(*model, mesh, options);
  AdamW optimizer(runtime->groups(), {});

  const auto ranks = make_tensor_parallel(*mesh);
  const auto data = mesh->data_mesh();
  const int each = kSamples / data->size();
  for (int step = 1; step <= 20; ++step) {
    at::Generator random = at::make_generator<at::CPUGeneratorImpl>(step);
    const at::Tensor all = at::randn({kSamples, kSeq, kDim}, random);
    const at::Tensor samples = all.narrow(0, data->rank() * each, each);
    // Between layers, each rank has a part of the tokens. Losses are summed
    // over the ranks, so each is divided by the number of ranks.
    const at::Tensor x = nn::own_tokens(ranks, samples);
    const at::Tensor loss = at::mse_loss(model(x), at::sin(2 * x)) / tp;
    loss.backward();
    const GradNorm clip = grad_norm_and_scale(runtime->groups(), 1.0);
    optimizer.step(/*lr=*/1e-2, clip.scale);
    optimizer.zero_grad();
    const at::Tensor mean = loss.detach() * (tp / double(mesh->size()));
    mesh->world().all_reduce(mean, ReduceOp::sum);
    if (mesh->rank() == 0 && step % 10 == 0) {
      fmt::print(
          "step {} loss {:.4f} norm {:.4f}\n",
          step,
          mean.item<double>(),
          clip.norm.item<double>());
    }
  }
  return 0;
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
