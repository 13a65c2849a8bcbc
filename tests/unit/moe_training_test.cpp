// Models with experts, sharded: N ranks against one.
#include "flatshard/models/llama.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/unit/fully_shard.h"
#include "tests/support/ranks.h"
#include "tests/unit/training.h"

namespace flatshard::testing {
namespace {

using models::ActivationCheckpoint;

constexpr std::int64_t kMoeVocab = 64;
constexpr std::int64_t kMoeSeq = 16;
constexpr std::int64_t kMoeExperts = 8;

struct MoeRun {
  std::string name;
  std::string strategy = "zero3";
  std::vector<int> mesh{2};
  int microbatches = 1;  // of a rank
  ActivationCheckpoint checkpoint = ActivationCheckpoint::none;
  bool reshard_after_forward = true;
  double capacity_factor = 0;
  double max_norm = 1e6;        // clips nothing
  bool experts_travel = false;  // the last axis of the mesh is that of experts
  // One product over the tokens of two ranks is rounded to bfloat16 once, those
  // of two microbatches twice: only float32 can show the same bits.
  bool float32 = experts_travel;

  int world() const {
    int n = 1;
    for (const int size : mesh) {
      n *= size;
    }
    return n;
  }
  int sequences() const { return world() * microbatches; }
};

struct MoeResult {
  std::map<std::pair<int, int>, double> losses;  // by (step, sequence)
  std::map<std::string, std::vector<float>> weights;
  std::vector<at::Tensor> biases;
};

models::Llama moe_model(
    const MoeRun& run,
    const std::shared_ptr<CollectiveExchange>& exchange,
    std::int64_t local_experts) {
  return models::Llama(
      models::ModelConfig{
          .family = "moe",
          .dim = 32,
          .layers = 3,
          .heads = 4,
          .kv_heads = 2,
          .ffn_dim = 64,
          .vocab_size = kMoeVocab,
          .max_seq_len = kMoeSeq,
          .qk_norm = true,
          .moe =
              {.num_experts = kMoeExperts,
               .experts_per_token = 2,
               .ffn_dim = 32,
               .shared_experts = 1,
               .dense_layers = 1,
               .router_score = nn::RouterScore::sigmoid,
               .router_bias = true}},
      models::LlamaOptions{
          .activation_checkpoint = run.checkpoint,
          .moe = {
              .aux_loss = 0.01,
              .z_loss = 0.001,
              .capacity_factor = run.capacity_factor,
              .exchange = exchange,
              .local_experts = local_experts}});
}

at::Tensor moe_sequence(int step, int index) {
  return at::randint(
      kMoeVocab,
      {1, kMoeSeq},
      at::make_generator<at::CPUGeneratorImpl>(
          static_cast<std::uint64_t>(100 * step + index)),
      at::kLong);
}

void train_moe_rank(
    const MoeRun& run,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    MoeResult& result) {
  const StreamOptions streams{
      .delay_seed = 3 + static_cast<std::uint64_t>(mesh->rank()),
      .max_delay_us = 200};
  FullyShardOptions options{
      .strategy = run.strategy,
      .seed = 11,
      .group = {.precision = run.float32 ? Precision::full() : Precision()},
      .runtime = {
          .reshard_after_forward = run.reshard_after_forward,
          .streams = streams}};
  std::shared_ptr<CollectiveExchange> exchange;
  std::int64_t local_experts = 0;
  if (run.experts_travel) {
    const int axis = mesh->num_axes() - 1;
    exchange = std::make_shared<CollectiveExchange>(
        mesh->communicator(axis, Purpose::exchange).shared_from_this(),
        kMoeExperts,
        ExchangeOptions{.groups_by_rank = true, .stream = streams});
    local_experts = kMoeExperts / mesh->axis(axis).size;
    const auto placement =
        ParameterPlacement::along(*mesh, mesh->axis(axis).name, kMoeExperts);
    options.placement_of = [placement](const std::string& name) {
      return models::is_expert_parameter(name) ? placement
                                               : ParameterPlacement{};
    };
  }
  models::Llama llama = moe_model(run, exchange, local_experts);
  for (const auto& unit : llama->unit_modules()) {
    options.units.push_back(unit.get());
  }
  const auto runtime = fully_shard(*llama, mesh, options);
  const auto routers = llama->routers();
  for (const models::RouterOf& of : routers) {
    of.router->make_bias(mesh->device());
  }
  // Of gradients near zero it makes little, so that their rounding shows less.
  AdamW optimizer(runtime->groups(), AdamWOptions{.eps = 1e-3});
  for (int step = 0; step < 3; ++step) {
    for (int m = 0; m < run.microbatches; ++m) {
      runtime->set_is_last_microbatch(m == run.microbatches - 1);
      const int index = mesh->rank() * run.microbatches + m;
      const at::Tensor in = moe_sequence(step, index);
      const at::Tensor loss = llama(in, in.roll(1, 1));
      (loss / run.microbatches).backward();
      const std::lock_guard lock(mutex);
      result.losses[{step, index}] = loss.item<double>();
    }
    const GradNorm norm = grad_norm_and_scale(runtime->groups(), run.max_norm);
    for (const models::RouterOf& of : routers) {
      const at::Tensor counts = of.router->take_load().counts.clone();
      if (mesh->size() > 1) {
        mesh->world(Purpose::reduce).all_reduce(counts, ReduceOp::sum);
      }
      of.router->update_bias(counts, 0.01);
    }
    optimizer.step(1e-3, norm.scale);
    optimizer.zero_grad();
  }
  optimizer.wait();
  runtime->synchronize();
  collect_weights(*runtime, mutex, result.weights);
  if (mesh->rank() == 0) {
    for (const models::RouterOf& of : routers) {
      result.biases.push_back(of.router->bias());
    }
  }
}

MoeResult train_moe(const MoeRun& run) {
  MoeResult result;
  std::mutex mutex;
  run_ranks(run.world(), [&](RankContext& context) {
    std::vector<MeshAxis> axes;
    for (std::size_t i = 0; i < run.mesh.size(); ++i) {
      axes.push_back({"axis" + std::to_string(i), run.mesh[i]});
    }
    train_moe_rank(run, context.mesh(axes), mutex, result);
  });
  return result;
}

class MoeTraining : public ::testing::TestWithParam<MoeRun> {};

INSTANTIATE_TEST_SUITE_P(
    Cases,
    MoeTraining,
    ::testing::Values(
        MoeRun{.name = "Zero0", .strategy = "zero0"},
        MoeRun{
            .name = "Zero1Clips",
            .strategy = "zero1",
            .microbatches = 3,
            .max_norm = 0.5},
        MoeRun{
            .name = "Zero2",
            .strategy = "zero2",
            .checkpoint = ActivationCheckpoint::full},
        MoeRun{.name = "Zero3"},
        MoeRun{
            .name = "Zero3Recomputes",
            .microbatches = 3,
            .checkpoint = ActivationCheckpoint::full,
            .capacity_factor = 1.0,
            .max_norm = 0.5},
        MoeRun{
            .name = "Zero3RecomputesExperts",
            .checkpoint = ActivationCheckpoint::selective,
            .reshard_after_forward = false},
        MoeRun{.name = "Zero3On4", .mesh = {4}},
        MoeRun{
            .name = "Hsdp",
            .strategy = "hsdp",
            .mesh = {2, 2},
            .checkpoint = ActivationCheckpoint::full},
        MoeRun{
            .name = "Hfsdp",
            .strategy = "hfsdp",
            .mesh = {2, 2},
            .max_norm = 0.5},
        MoeRun{
            .name = "Zero0Travels",
            .strategy = "zero0",
            .mesh = {1, 2},
            .experts_travel = true},
        MoeRun{
            .name = "Zero1Travels",
            .strategy = "zero1",
            .mesh = {2, 2},
            .max_norm = 0.5,
            .experts_travel = true},
        MoeRun{
            .name = "Zero2Travels",
            .strategy = "zero2",
            .mesh = {1, 4},
            .microbatches = 3,
            .checkpoint = ActivationCheckpoint::full,
            .experts_travel = true},
        MoeRun{.name = "Zero3Travels", .mesh = {1, 2}, .experts_travel = true},
        MoeRun{
            .name = "Zero3TravelsAndDrops",
            .mesh = {2, 2},
            .checkpoint = ActivationCheckpoint::selective,
            .capacity_factor = 1.0,
            .max_norm = 0.5,
            .experts_travel = true},
        MoeRun{
            .name = "HsdpTravels",
            .strategy = "hsdp",
            .mesh = {2, 1, 2},
            .checkpoint = ActivationCheckpoint::full,
            .max_norm = 0.5,
            .experts_travel = true},
        MoeRun{
            .name = "HfsdpTravels",
            .strategy = "hfsdp",
            .mesh = {2, 1, 2},
            .experts_travel = true}),
    [](const auto& info) { return info.param.name; });

// Two ranks' gradients have one sum, whoever adds. More of them, and squares
// for clipping, come in another order: 3 steps of at most 1e-3 * error / eps,
// with errors of a few 2^-24. Small enough that no token changes its experts:
// scores that nearly tie would make it another run.
constexpr double kOtherOrder = 1e-5;

TEST_P(MoeTraining, EqualsOneRank) {
  const MoeRun& run = GetParam();
  MoeRun alone = run;
  alone.strategy = "zero0";
  alone.mesh = {1};
  alone.microbatches = run.sequences();
  alone.reshard_after_forward = true;
  alone.experts_travel = false;
  const MoeResult want = train_moe(alone);
  const MoeResult got = train_moe(run);
  // Of all sequences: each rank has its share of the microbatches.
  const bool bitwise = run.world() == 2 && run.microbatches == 1;
  const double tolerance = bitwise ? 0 : kOtherOrder;
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (const auto& [key, loss] : want.losses) {
    EXPECT_NEAR(got.losses.at(key), loss, tolerance)
        << "step " << key.first << " sequence " << key.second;
  }
  ASSERT_EQ(got.weights.size(), want.weights.size());
  for (const auto& [name, values] : want.weights) {
    const auto& mine = got.weights.at(name);
    ASSERT_EQ(mine.size(), values.size()) << name;
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(mine[i], values[i], tolerance) << name << ' ' << i;
    }
  }
  ASSERT_EQ(got.biases.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::equal(got.biases[i], want.biases[i]));
    EXPECT_GT(got.biases[i].abs().max().item<double>(), 0);
  }
}

}  // namespace
}  // namespace flatshard::testing
