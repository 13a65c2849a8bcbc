#include "tests/runtime/twin.h"

#include "flatshard/group/initializer.h"
#include "tests/support/sum_order.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kDim = 12;
constexpr std::int64_t kBatch = 4;
constexpr int kCells = 4;
constexpr std::uint64_t kSeed = 3;
constexpr double kLr = 0.05;
void expect_near(
    const NamedShard& shard,
    const at::Tensor& whole,
    const char* what) {
  const at::Tensor expected = whole.defined() ? whole.detach().flatten().narrow(
                                                    0,
                                                    shard.begin,
                                                    shard.tensor.numel())
                                              : at::zeros_like(shard.tensor);
  if (expected.numel() == 0) {
    return;
  }
  const double bound =
      twin_tolerance(std::max(1.0, expected.abs().max().item<double>()));
  EXPECT_LE((shard.tensor - expected).abs().max().item<double>(), bound)
      << what << " of " << shard.name();
}

}  // namespace

double twin_tolerance(double size) {
  constexpr int kMostSteps = 5;  // each passes on its errors in the weights
  return sum_tolerance(
      {.addends = kBatch * kDim,
       .in_a_row = 2 * (kCells + 1) * kMostSteps,
       .size = size});
}

CellImpl::CellImpl(std::int64_t dim)
    : body([](CellImpl& cell, at::Tensor x) { return cell.standard(x); }) {
  up = register_module(
      "up",
      nn::Linear(
          dim,
          dim,
          nn::LinearOptions{.bias = true, .init = InitSpec::normal(0, 0.3F)}));
  gain = declare_parameter("gain", {dim}, InitSpec::normal(1, 0.1F));
  spare = declare_parameter("spare", {3}, InitSpec::normal(1, 0.1F));
}

at::Tensor CellImpl::standard(const at::Tensor& x) {
  return x + at::tanh(up(x)) * gain;
}

LabImpl::LabImpl()
    : body([](LabImpl& lab, at::Tensor x) { return lab.standard(x); }) {
  scale = declare_parameter("scale", {kDim}, InitSpec::normal(1, 0.1F));
  for (int i = 0; i < kCells; ++i) {
    cells.push_back(register_module("cell" + std::to_string(i), Cell(kDim)));
  }
}

at::Tensor LabImpl::chain(at::Tensor x) {
  for (Cell& cell : cells) {
    x = cell(x);
  }
  return x;
}

std::vector<nn::Module*> LabImpl::units() {
  if (choose_units) {
    return choose_units(*this);
  }
  std::vector<nn::Module*> units;
  for (Cell& cell : cells) {
    units.push_back(cell.get());
  }
  return units;
}

Twin::Twin(
    const RankContext& context,
    const std::function<void(LabImpl&)>& configure,
    FullyShardOptions options,
    std::shared_ptr<Mesh> mesh)
    : rank(context.rank), world(context.world) {
  if (configure) {
    configure(*sharded);
    configure(*plain);
  }
  const Initializer values(kSeed);
  nn::materialize(
      *plain,
      at::kCPU,
      at::kFloat,
      [&](const std::string& name, const InitSpec& spec, at::Tensor& t) {
        values.fill(t, name, spec, 0);
      });
  for (const auto& p : nn::named_parameters(*plain)) {
    plain_parameters[p.name] = p.tensor;
  }
  options.units = sharded->units();
  options.group.precision = Precision::full();
  options.seed = kSeed;
  options.runtime.streams.delay_seed = 7 + static_cast<std::uint64_t>(rank);
  if (options.runtime.streams.max_delay_us == 0) {
    options.runtime.streams.max_delay_us = 50;
  }
  options.runtime.trace = true;
  runtime = fully_shard(*sharded, mesh ? mesh : context.mesh(), options);
  sgd = std::make_unique<Sgd>(runtime->groups(), SgdOptions{.momentum = 0});
}

at::Tensor Twin::input(int of_rank, int index) const {
  const at::Tensor x = at::empty({kBatch, kDim});
  const std::string name =
      fmt::format("input {} {} {}", num_steps, of_rank, index);
  Initializer(kSeed).fill(x, name, InitSpec::normal(0, 1), 0);
  return x;
}

at::Tensor Twin::loss(const at::Tensor& out) const {
  return out.square().mean() * scale_;
}

void Twin::backward(const at::Tensor& out) const {
  loss(out).backward();
}

void Twin::run_sharded(const Program& program) {
  scale_ = 1;
  program(sharded, *this, rank);
}

void Twin::run(const Program& program) {
  run_sharded(program);
  scale_ = 1.0 / world;
  for (int r = 0; r < world; ++r) {
    program(plain, *this, r);
  }
  expect_same_gradients();
  expect_rest();
}

void Twin::update() {
  sgd->step(kLr);
  sgd->zero_grad();
  {
    const at::NoGradGuard no_grad;
    for (auto& p : nn::named_parameters(*plain)) {
      if (p.tensor.grad().defined()) {
        p.tensor.sub_(p.tensor.grad() * kLr);
        p.tensor.mutable_grad() = at::Tensor();
      }
    }
  }
  ++num_steps;
  runtime->synchronize();
  for (const auto& unit : runtime->units()) {
    for (const auto& group : unit->groups()) {
      for (const NamedShard& shard : group->main_shards()) {
        expect_near(shard, plain_parameters.at(shard.name()), "weight");
      }
    }
  }
}

void Twin::expect_same_gradients() const {
  runtime->synchronize();
  for (const ParamGroup* group : runtime->groups()) {
    if (group->gradients().reduced().exists()) {
      for (const auto& shard :
           group->shards_of(group->gradients().reduced().local())) {
        expect_near(
            shard,
            plain_parameters.at(shard.name()).grad(),
            "gradient");
      }
      continue;
    }
    for (const GroupParameter& p : group->parameters()) {
      EXPECT_FALSE(plain_parameters.at(p.names.front()).grad().defined())
          << "no gradient came for " << p.names.front();
    }
  }
}

void Twin::expect_rest() const {
  EXPECT_TRUE(runtime->scheduler().resting());
  EXPECT_TRUE(
      may_keep_weights || runtime->executor().slots().pool().num_held() == 0);
  for (const auto& p : sharded->named_parameters()) {
    EXPECT_FALSE(p.value().grad().defined()) << p.key();
  }
}

ParamGroup& Twin::group_of(const std::string& parameter) const {
  for (const auto& unit : runtime->units()) {
    for (const auto& group : unit->groups()) {
      for (const GroupParameter& p : group->parameters()) {
        if (std::ranges::find(p.names, parameter) != p.names.end()) {
          return *group;
        }
      }
    }
  }
  throw std::invalid_argument("no group holds " + parameter);
}

void for_strategies(
    const std::function<void(const RankContext&, FullyShardOptions)>& test) {
  struct Case {
    const char* strategy;
    int world;
    int prefetch;
    bool reshard;
    int outer = 0;  ///< size of an outer axis; 0: none
  };
  for (const Case& c :
       {Case{"zero3", 2, 1, true},
        Case{"zero3", 3, 2, true},
        Case{"zero3", 1, 0, true},
        Case{"zero3", 2, 1, false},
        Case{"zero2", 2, 1, true},
        Case{"zero1", 2, 1, true},
        Case{"zero0", 2, 1, true},
        Case{"hsdp", 4, 1, true, 2},
        Case{"hfsdp", 4, 1, true, 2}}) {
    SCOPED_TRACE(fmt::format(
        "{} on {} prefetch {} reshard {}",
        c.strategy,
        c.world,
        c.prefetch,
        c.reshard));
    FullyShardOptions options{.strategy = c.strategy};
    options.runtime.prefetch = c.prefetch;
    options.runtime.reshard_after_forward = c.reshard;
    run_ranks(c.world, [&](RankContext& context) {
      if (c.outer > 0) {
        context.axes = {{"outer", c.outer}, {"dp", c.world / c.outer}};
      }
      test(context, options);
    });
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
}

void forward_backward(Lab& model, const Twin& twin, int rank) {
  twin.backward(model(twin.input(rank)));
}

void check(
    const std::function<void(LabImpl&)>& configure,
    const Twin::Program& program) {
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, configure, options);
    twin.step(forward_backward);
    for (int i = 0; i < 3; ++i) {
      twin.step(program);
    }
    twin.step(forward_backward);
  });
}

}  // namespace flatshard::testing
