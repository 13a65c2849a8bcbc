#include "tests/runtime/moe_training.h"
#include "flatshard/graphs/model_graphs.h"

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/fully_shard/expert_parallel.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/optim/adamw.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/peer/page_communicator.h"
#include "flatshard/peer/peer_communicator.h"
#include "tests/support/ranks.h"
#include "tests/support/sum_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kMoeVocab = 64;
constexpr std::int64_t kMoeSeq = 16;
constexpr std::int64_t kMoeDim = 32;
constexpr std::int64_t kMoeExperts = 8;
constexpr std::int64_t kMoeTopK = 2;
constexpr std::int64_t kMoeWidth = 32;

models::Llama moe_model(
    const MoeRun& run,
    const std::shared_ptr<StreamExchange>& exchange,
    const ExpertPart& part) {
  return models::Llama(
      models::ModelConfig{
          .family = "moe",
          .dim = kMoeDim,
          .layers = 3,
          .heads = 4,
          .kv_heads = 2,
          .ffn_dim = 64,
          .vocab_size = kMoeVocab,
          .max_seq_len = kMoeSeq,
          .block = {.attention = {.qk_norm = models::QkNorm::head}},
          .moe =
              {.num_experts = kMoeExperts,
               .experts_per_token = kMoeTopK,
               .ffn_dim = kMoeWidth,
               .shared_experts = 1,
               .dense_layers = 1,
               .router_score = nn::RouterScore::sigmoid,
               .router_bias = run.bias}},
      models::LlamaOptions{
          .activation_checkpoint = run.checkpoint,
          .moe = {
              .aux_loss = run.aux_loss ? 0.01 : 0.0,
              .z_loss = run.aux_loss ? 0.001 : 0.0,
              .capacity_factor = run.capacity_factor,
              .exchange = exchange,
              .local_experts = kMoeExperts / part.ranks,
              .local_ffn_dim = kMoeWidth / part.width_ranks}});
}

std::shared_ptr<StreamExchange> moe_exchange(
    const MoeRun& run,
    const std::shared_ptr<Communicator>& group,
    std::int64_t ranks_per_expert,
    const StreamOptions& streams) {
  const ExchangeOptions options{
      .groups_by_rank = run.groups_by_rank,
      .ranks_per_expert = ranks_per_expert,
      .stream = streams};
  if (run.exchange == MoeExchange::collective) {
    return std::make_shared<CollectiveExchange>(group, kMoeExperts, options);
  }
  constexpr auto kRowNbytes =
      (kMoeDim + 1) * static_cast<std::int64_t>(sizeof(float));
  const auto fences =
      group->device().is_cuda() ? make_peer_communicator(group, {}) : group;
  return std::make_shared<PeerExchange>(
      fences,
      make_page_communicator(group),
      kMoeExperts,
      PeerExchangeOptions{
          .window_nbytes = kMoeSeq * kMoeTopK * kRowNbytes,
          .exchange = options});
}

at::Tensor moe_sequence(int step, int index) {
  return at::randint(
      kMoeVocab,
      {1, kMoeSeq},
      at::make_generator<at::CPUGeneratorImpl>(
          static_cast<std::uint64_t>(100 * step + index)),
      at::kLong);
}

void update_biases(const std::vector<models::RouterOf>& routers, Mesh& mesh) {
  for (const models::RouterOf& of : routers) {
    const at::Tensor counts = of.router->take_load().counts.clone();
    if (mesh.size() > 1) {
      mesh.world(Purpose::reduce).all_reduce(counts, ReduceOp::sum);
    }
    of.router->update_bias(counts, 0.01);
  }
}

}  // namespace

void train_moe_rank(
    const MoeRun& run,
    const std::shared_ptr<Mesh>& mesh,
    std::mutex& mutex,
    MoeResult& result) {
  const StreamOptions streams{
      .delay_seed = run.delay_seed + static_cast<std::uint64_t>(mesh->rank()),
      .max_delay_us = 200};
  FullyShardOptions options{
      .strategy = run.strategy,
      .seed = 11,
      .group = {.precision = run.float32 ? Precision::full() : Precision()},
      .runtime = {
          .reshard_after_forward = run.reshard_after_forward,
          .streams = streams,
          .graphs = {
              .enabled = run.graphs,
              .regions = run.regions,
              .warmup_steps = 1,
              .miss_is_error = mesh->device().is_cpu(),
              .emulate_on_cpu = run.graphs && mesh->device().is_cpu()}}};
  std::shared_ptr<StreamExchange> exchange;
  ExpertPart part;
  if (run.exchange != MoeExchange::none) {
    const int experts = mesh->num_axes() - (run.cuts_width ? 2 : 1);
    part = {
        .rank = mesh->coordinate(experts),
        .ranks = mesh->axis(experts).size};
    std::vector<int> axes{experts};
    std::vector<std::string> names{mesh->axis(experts).name};
    if (run.cuts_width) {
      const int width = experts + 1;
      part.width_rank = mesh->coordinate(width);
      part.width_ranks = mesh->axis(width).size;
      axes.push_back(width);
      names.push_back(mesh->axis(width).name);
    }
    exchange = moe_exchange(
        run,
        mesh->communicator(axes, Purpose::exchange).shared_from_this(),
        part.width_ranks,
        streams);
    options.placement_of = [mesh, names, part](const std::string& name) {
      return models::is_expert_parameter(name)
                 ? expert_placement(*mesh, names, expert_slice(name, part))
                 : ParameterPlacement{};
    };
  }
  models::Llama llama = moe_model(run, exchange, part);
  for (const auto& unit : llama->unit_modules()) {
    options.units.push_back(unit.get());
  }
  const auto runtime = fully_shard(*llama, mesh, options);
  const auto routers = llama->routers();
  if (run.bias) {
    for (const models::RouterOf& of : routers) {
      of.router->make_bias(mesh->device());
    }
  }
  // A large eps makes little of gradients near zero, so that their rounding
  // shows less.
  AdamW optimizer(runtime->groups(), AdamWOptions{.eps = 1e-3});
  for (int step = 0; step < run.steps; ++step) {
    for (int m = 0; m < run.microbatches; ++m) {
      runtime->set_is_last_microbatch(m == run.microbatches - 1);
      const int index = mesh->rank() * run.microbatches + m;
      const at::Tensor in = moe_sequence(step, index).to(mesh->device());
      const at::Tensor loss = llama(in, in.roll(1, 1));
      (loss / run.microbatches).backward();
      const std::lock_guard lock(mutex);
      result.losses[{step, index}] = loss.item<double>();
    }
    const GradNorm norm = grad_norm_and_scale(runtime->groups(), run.max_norm);
    if (mesh->rank() == 0) {
      result.norms[step] = norm.norm.item<double>();
    }
    if (run.bias) {
      update_biases(routers, *mesh);
    }
    optimizer.step(1e-3, norm.scale);
    optimizer.zero_grad();
  }
  optimizer.wait();
  runtime->synchronize();
  collect_weights(*runtime, mutex, result.weights);
  if (mesh->rank() == 0 && run.graphs) {
    const GraphStats stats = runtime->graphs().stats();
    result.num_replays = stats.forward_replays + stats.backward_replays;
  }
  if (mesh->rank() == 0 && run.bias) {
    for (const models::RouterOf& of : routers) {
      result.biases.push_back(of.router->bias());
    }
  }
}

int MoeRun::world() const {
  int n = 1;
  for (const int size : mesh) {
    n *= size;
  }
  return n;
}

MoeRun moe_reference(const MoeRun& run) {
  return {
      .strategy = "zero0",
      .mesh = {1},
      .microbatches = run.sequences(),
      .capacity_factor = run.capacity_factor,
      .max_norm = run.max_norm,
      .float32 = run.float32,
      .aux_loss = run.aux_loss,
      .bias = run.bias,
      .steps = run.steps};
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

MoeDistance moe_distance(const MoeResult& got, const MoeResult& want) {
  MoeDistance distance;
  const auto note = [&](double difference, const std::string& where) {
    if (!(difference <= distance.largest)) {
      distance = {difference, where};
    }
  };
  constexpr double kNever = std::numeric_limits<double>::infinity();
  for (const auto& [key, loss] : want.losses) {
    const auto& [step, sequence] = key;
    const auto found = got.losses.find(key);
    note(
        found == got.losses.end() ? kNever : std::abs(found->second - loss),
        fmt::format("the loss of sequence {} in step {}", sequence, step));
  }
  for (const auto& [step, norm] : want.norms) {
    note(
        std::abs(got.norms.at(step) - norm),
        fmt::format("the gradients' norm in step {}", step));
  }
  for (const auto& [name, values] : want.weights) {
    const auto found = got.weights.find(name);
    if (found == got.weights.end() || found->second.size() != values.size()) {
      note(kNever, name);
      continue;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      note(std::abs(found->second[i] - values[i]), name);
    }
  }
  const bool same_biases = std::ranges::equal(
      got.biases,
      want.biases,
      [](const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); });
  if (!same_biases || got.losses.size() != want.losses.size() ||
      got.weights.size() != want.weights.size()) {
    note(kNever, same_biases ? "what there is" : "a router's bias");
  }
  return distance;
}

double moe_tolerance(const MoeRun& run) {
  if (run.world() == 1 || run.sequences() == 2) {
    return 0;
  }
  // The gradients of a step, then their norm. Ranks that divide the width of
  // experts add up its parts, in two layers, forward and backward.
  const std::int64_t width = run.cuts_width ? kMoeWidth : 1;
  const int of_width = run.cuts_width ? 2 * 2 : 0;
  return sum_tolerance(
      {.addends = std::max<std::int64_t>(run.sequences(), width),
       .in_a_row = (2 + of_width) * run.steps,
       .size = std::log(double{kMoeVocab})});  // the size of a loss
}

}  // namespace flatshard::testing
