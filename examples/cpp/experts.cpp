// Custom experts, divided among ranks: tokens are sent to the ranks that have
// their experts, and back. docs/get_started/quickstart_cpp.md#experts walks
// through it.
//   build-example/experts FOLDER        one rank has all experts
//   build-example/experts FOLDER 2      two have half of them each; continues
//   build-example/experts FOLDER 4      and each half is sharded over two
//   build-example/experts FOLDER 2 overlap   two microbatches in flight
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <flatshard/flatshard.h>

using namespace flatshard;

constexpr std::int64_t kDim = 8;
constexpr std::int64_t kWidth = 16;
constexpr std::int64_t kExperts = 4;
constexpr int kSteps = 100;  // a run
constexpr int kMicrobatches = 2;

struct ExpertsImpl : nn::Module {
  at::Tensor up, down;
  explicit ExpertsImpl(std::int64_t here) {
    const auto init = InitSpec::normal(0, 0.3);
    up = declare_parameter("up", {here, kWidth, kDim}, init);
    down = declare_parameter("down", {here, kDim, kWidth}, init);
  }
  // Rows by expert; where each group of rows ends.
  at::Tensor
  forward(const at::Tensor& rows, const at::Tensor& ends, std::int64_t n) {
    const nn::Groups groups{ends, /*per_expert=*/n};
    const at::Tensor h = nn::grouped_linear(rows, up, groups, context());
    return nn::grouped_linear(at::gelu(h), down, groups, context());
  }
};
FLATSHARD_MODULE(Experts);

struct BlockImpl : nn::Module {
  nn::Linear router = register_module("router", nn::Linear(kDim, kExperts));
  Experts experts{nullptr};
  std::shared_ptr<nn::TokenExchange> exchange;
  BlockImpl(std::shared_ptr<nn::TokenExchange> tokens, std::int64_t here)
      : exchange(std::move(tokens)) {
    experts = register_module("experts", Experts(here));
  }
  // Returns one call in pieces, between which rows are exchanged.
  nn::Nodes nodes() {
    using Direction = nn::TokenExchange::Direction;
    struct Routed {
      nn::Permutation order;
      nn::ExchangePlanPtr plan;
    };
    const auto routed = std::make_shared<Routed>();
    nn::Nodes nodes;  // the block's input is tensor 0
    const auto sent = nodes.add(
        "router",
        {0},
        3,
        {router.get()},
        [this, routed](const nn::TensorList& in) {
          const at::Tensor& x = in[0];
          const nn::RouterOptions options{
              .experts_per_token = 2,
              .aux_loss = 0.01};
          const nn::Routing routing = nn::route(router(x), {}, options);
          routed->order = nn::sort_by_expert(routing.experts, routing.counts);
          // Once a layer: how many rows go where. The host waits for it in
          // the dispatch.
          routed->plan =
              exchange->begin_plan(routing.counts, routed->order.rows());
          return nn::TensorList{
              x,
              x.view(x.sizes()),
              nn::permute_weights(routing.weights, routed->order)};
        });
    const auto route = [this, routed](Direction direction) {
      return [this, routed, direction] {
        return nn::RowRoute{exchange, routed->plan, direction, routed->order};
      };
    };
    const auto arrived = nodes.exchange(
        "dispatch",
        {sent[1], sent[2]},
        route(Direction::dispatch));
    const auto results = nodes.add(
        "experts",
        arrived,
        1,
        {experts.get()},
        [this, routed](const nn::TensorList& in) {
          const nn::ExchangePlan& plan = *routed->plan;
          const at::Tensor rows =
              experts(in[0], plan.ends, plan.groups_per_expert);
          return nn::TensorList{rows * in[1].unsqueeze(1)};
        });
    nodes.exchange(
        "combine",
        results,
        route(Direction::combine),
        /*addend=*/sent[0]);
    return nodes;
  }
  at::Tensor forward(const at::Tensor& x) { return nodes().run({x})[0]; }
};
FLATSHARD_MODULE(Block);

struct NetImpl : nn::Module {
  Block first{nullptr}, second{nullptr};
  NetImpl(
      const std::shared_ptr<nn::TokenExchange>& exchange,
      std::int64_t here) {
    first = register_module("first", Block(exchange, here));
    second = register_module("second", Block(exchange, here));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
};
FLATSHARD_MODULE(Net);

// 128 samples. `seed` is another one on each rank.
at::Tensor draw(std::int64_t seed, at::Device device) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({128, kDim}, random).to(device);
}

at::Tensor mean_loss(const at::Tensor& y, const at::Tensor& x) {
  return at::mse_loss(y, at::sin(2 * x));
}

double evaluate(Net& model, Mesh& mesh) {
  const at::NoGradGuard no_grad;
  at::Tensor sum = at::zeros({}, at::TensorOptions(mesh.device()));
  for (int i = mesh.rank(); i < 8; i += mesh.size()) {
    const at::Tensor x = draw(1'000'000 + i, mesh.device());
    sum += mean_loss(model(x), x);
  }
  mesh.world().all_reduce(sum, ReduceOp::sum);
  return sum.item<double>() / 8;
}

int train(const std::string& folder, bool overlaps) {
  const RankEnvironment env = rank_environment_from_env();
  const at::Device device = num_cuda_devices() > env.local_rank
                                ? at::Device(at::kCUDA, env.local_rank)
                                : at::Device(at::kCPU);
  const int ep = env.world_size % 2 == 0 ? 2 : 1;
  // Adjacent ranks split the experts. Ranks along edp have the same ones.
  const auto axes =
      std::vector<MeshAxis>{{"edp", env.world_size / ep}, {"ep", ep}};
  const auto mesh =
      env.world_size == 1
          ? Mesh::single(device)
          : Mesh::create(axes, env.rank, make_tcp_store(env), device);

  std::shared_ptr<nn::TokenExchange> exchange =
      std::make_shared<nn::LocalExchange>();
  FullyShardOptions options{.group = {.precision = Precision::full()}};
  if (ep > 1) {
    const int axis = mesh->axis_index("ep");
    exchange = std::make_shared<CollectiveExchange>(
        mesh->communicator(axis, Purpose::exchange).shared_from_this(),
        kExperts);
    // A block stays one unit: its experts are sharded over edp, its router over
    // all ranks.
    const auto placement = ParameterPlacement::along(*mesh, "ep", kExperts);
    options.placement_of = [placement](const std::string& name) {
      const bool is_expert = name.find(".experts.") != std::string::npos;
      return is_expert ? placement : ParameterPlacement{};
    };
  }
  Net model(exchange, kExperts / ep);
  options.units = {model->first.get(), model->second.get()};
  const auto runtime = fully_shard(*model, mesh, options);
  AdamW optimizer(runtime->groups(), {.weight_decay = 0.01});

  // The backward of one microbatch in parallel with the forward of the other.
  std::vector<at::Tensor> x(kMicrobatches);
  std::unique_ptr<OverlapRunner> runner;
  if (overlaps) {
    OverlapModel pieces{
        .root = runtime->unit_of(*model),
        .layers =
            {runtime->unit_of(*model->first), runtime->unit_of(*model->second)},
        .embed = [&](int m) { return x[m]; },
        .nodes =
            [&](int /*m*/, int layer) {
              return (layer == 0 ? model->first : model->second)->nodes();
            },
        .head =
            [&](int m, const at::Tensor& y) {
              return mean_loss(y, x[m]) / kMicrobatches;
            }};
    runner = std::make_unique<OverlapRunner>(
        runtime,
        pieces,
        kMicrobatches,
        OverlapPlanOptions{.delay_wgrad = true});
  }

  std::int64_t step = 0;
  if (const auto latest = latest_checkpoint(folder)) {
    step = load_checkpoint(
               step_folder(folder, *latest),
               runtime->all_groups(),
               &optimizer)
               .step;
  }
  const std::int64_t begin = step;
  const double before = evaluate(model, *mesh);
  while (step < begin + kSteps) {
    runtime->set_step(++step);
    for (int m = 0; m < kMicrobatches; ++m) {
      x[m] = draw(
          (step * kMicrobatches + m) * mesh->size() + mesh->rank(),
          device);
    }
    if (runner) {
      runner->run();
    }
    for (int m = 0; !runner && m < kMicrobatches; ++m) {
      runtime->set_is_last_microbatch(m + 1 == kMicrobatches);
      (mean_loss(model(x[m]), x[m]) / kMicrobatches).backward();
    }
    const GradNorm clip = grad_norm_and_scale(runtime->groups(), 1.0);
    optimizer.step(/*lr=*/1e-2, clip.scale);
    optimizer.zero_grad();
  }
  const double after = evaluate(model, *mesh);
  // The checkpoint stores unsharded expert layers, whatever the degree.
  Checkpointer checkpointer(
      mesh,
      runtime->all_groups(),
      &optimizer,
      {.folder = folder});
  checkpointer.save(step, {});
  checkpointer.wait();
  for (const SaveResult& saved : checkpointer.take_results()) {
    if (saved.error) {
      throw *saved.error;
    }
  }
  if (mesh->rank() == 0) {
    fmt::print(
        "steps {} to {} on {} ranks, {} of {} experts on each: loss {:.9g} -> "
        "{:.9g}\n",
        begin,
        step,
        mesh->size(),
        kExperts / ep,
        kExperts,
        before,
        after);
  }
  return after < before ? 0 : 1;
}

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv, argv + argc);
  try {
    FLATSHARD_CHECK(
        argc >= 2 && argc <= 4,
        usage,
        "expected FOLDER [RANKS [overlap]], got {} arguments",
        argc - 1);
    if (argc >= 3 && !launched_by_environment()) {
      return spawn_local_ranks(std::stoi(args[2]), args);
    }
    return train(args[1], args.back() == "overlap");
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
