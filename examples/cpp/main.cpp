// A custom model, fully sharded: residual blocks learn a function. Train,
// accumulate, evaluate, save and continue; docs/get_started/quickstart_cpp.md
// walks through it.
//   build-example/example FOLDER                one rank; again: continues
//   build-example/example FOLDER 2              two ranks on this host
//   torchrun --no-python --nproc_per_node 2 build-example/example FOLDER
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <flatshard/flatshard.h>

using namespace flatshard;

constexpr std::int64_t kDim = 8;
constexpr int kSteps = 100;  // a run
constexpr int kMicrobatches = 2;
constexpr int kInterval = 50;  // steps between checkpoints

struct BlockImpl : nn::Module {
  nn::Linear up = register_module("up", nn::Linear(kDim, 4 * kDim));
  nn::Linear down = register_module("down", nn::Linear(4 * kDim, kDim));
  at::Tensor gain = declare_parameter("gain", {kDim}, InitSpec::ones());
  BlockImpl() { set_attribute("gain", kWeightDecayAttribute, "none"); }
  at::Tensor forward(const at::Tensor& x) {
    // The same kernels in each call: a region that may run as a CUDA graph.
    return nn::region(
        *this,
        "block",
        [this](const nn::TensorList& in) {
          const at::Tensor& x = in[0];
          return nn::TensorList{x + down(at::gelu(up(x))) * gain};
        },
        {x})[0];
  }
};
FLATSHARD_MODULE(Block);

struct MlpImpl : nn::Module {
  nn::Linear mix = register_module("mix", nn::Linear(kDim, kDim));
  Block first = register_module("first", Block());
  Block second = register_module("second", Block());
  MlpImpl() {
    mix->weight().set_requires_grad(false);  // frozen: before fully_shard
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& target) {
    return at::mse_loss(second(first(x + mix(x))), target);
  }
};
FLATSHARD_MODULE(Mlp);

struct Batch {
  at::Tensor x, target;
};

Batch draw_batch(std::int64_t seed, at::Device device) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Tensor x = at::randn({128, kDim}, random).to(device);
  return {x, at::sin(2 * x)};
}

// Returns the mean loss of eight batches that no step sees. Collective: as many
// forwards on every rank.
double evaluate(Mlp& model, Mesh& mesh) {
  const at::NoGradGuard no_grad;
  at::Tensor sum = at::zeros({}, at::TensorOptions(mesh.device()));
  for (int i = mesh.rank(); i < 8; i += mesh.size()) {
    const Batch batch = draw_batch(1'000'000 + i, mesh.device());
    sum += model(batch.x, batch.target);
  }
  mesh.world().all_reduce(sum, ReduceOp::sum);
  return sum.item<double>() / 8;
}

int train(const std::string& folder) {
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
      {.units = {model->first.get(), model->second.get()},  // one unit each
       .strategy = "zero3",
       .group = {.precision = Precision::full()},
       .runtime = {.graphs = {.enabled = device.is_cuda()}}});
  AdamW optimizer(runtime->groups(), {.weight_decay = 0.01});

  std::int64_t step = 0;
  if (const auto latest = latest_checkpoint(folder)) {
    step = load_checkpoint(
               step_folder(folder, *latest),
               runtime->all_groups(),
               &optimizer)
               .step;
  }
  Checkpointer checkpointer(
      mesh,
      runtime->all_groups(),  // frozen ones as well
      &optimizer,
      {.folder = folder, .keep_latest = 2});

  const double before = evaluate(model, *mesh);
  const std::int64_t begin = step;
  while (step < begin + kSteps) {
    ++step;
    runtime->set_step(step);  // errors name it
    for (int m = 0; m < kMicrobatches; ++m) {
      runtime->set_is_last_microbatch(m + 1 == kMicrobatches);
      // Every rank draws separate batches, and the gradients are averaged.
      const Batch batch = draw_batch(
          (step * kMicrobatches + m) * mesh->size() + mesh->rank(),
          device);
      (model(batch.x, batch.target) / kMicrobatches).backward();
    }
    const GradNorm clip = grad_norm_and_scale(runtime->groups(), 1.0);
    checkpointer.wait_for_copies();  // before anything is updated
    optimizer.step(/*lr=*/1e-2, clip.scale);
    optimizer.zero_grad();
    if (step % kInterval == 0) {
      checkpointer.save(step, {{"note", "any text"}});
    }
  }

  const double after = evaluate(model, *mesh);
  checkpointer.wait();
  for (const SaveResult& saved : checkpointer.take_results()) {
    if (saved.error) {
      throw *saved.error;
    }
  }
  if (device.is_cuda()) {
    fmt::print(stderr, "{}\n", to_string(runtime->graphs().stats()));
  }
  if (mesh->rank() == 0) {
    fmt::print(
        "steps {} to {} on {} ranks: loss {:.5f} -> {:.5f}\n",
        begin,
        step,
        mesh->size(),
        before,
        after);
  }
  return after < before ? 0 : 1;
}

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv, argv + argc);
  try {
    FLATSHARD_CHECK(
        argc == 2 || argc == 3,
        usage,
        "expected FOLDER [RANKS], got {} arguments",
        argc - 1);
    if (argc == 3 && !launched_by_environment()) {
      return spawn_local_ranks(std::stoi(args[2]), args);
    }
    return train(args[1]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
