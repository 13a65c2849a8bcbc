// States in host memory: updates are bitwise identical to updates of states on
// the device. On a CPU both are ordinary memory, and streams are threads.
#include "flatshard/core/error.h"
#include "flatshard/device/stream.h"
#include "flatshard/optim/moments.h"
#include "flatshard/optim/optimizer.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

// The weights of groups of different sizes.
const std::vector<std::vector<std::int64_t>> kShapes =
    {{40, 256}, {17, 256}, {4096}, {96, 256}, {48}, {67, 71}};

struct Case {
  std::string name;
  ParameterRules rules;
  at::ScalarType main_params = at::kFloat;
  bool rounds = false;
  bool overlaps = false;  ///< updates run on another stream
};

/// A model of groups, their optimizer, and steps of it.
class Model {
 public:
  Model(
      const std::shared_ptr<Mesh>& mesh,
      const std::string& strategy,
      const Case& of,
      bool offloads) {
    for (std::size_t i = 0; i < kShapes.size(); ++i) {
      owned_.push_back(std::make_unique<ParamGroup>(
          GroupSpec{
              .name = "group " + std::to_string(i),
              .parameters =
                  {{.names = {"weight" + std::to_string(i)},
                    .shape = kShapes[i],
                    .init = InitSpec::normal(0, 1)},
                   {.names = {"bias" + std::to_string(i)},
                    .shape = {25},
                    .init = InitSpec::normal(0, 1)}},
              .mesh = mesh,
              .strategy = Strategy::named(strategy, mesh->num_axes())},
          ParamGroupOptions{
              .precision =
                  {.compute = at::kBFloat16,
                   .reduce = at::kFloat,
                   .main_params = of.main_params},
              .alignment = kInt8Alignment},
          Initializer(5)));
      groups_.push_back(owned_.back().get());
      groups_.back()->set_divisor(1);
    }
    optimizer_ = std::make_unique<Optimizer>(
        groups_,
        of.rules,
        StateOffload{
            .enabled = offloads,
            .streams = {.delay_seed = 7, .max_delay_us = 1000}});
    if (of.rounds) {
      optimizer_->set_stochastic_rounding(3);
    }
    if (of.overlaps) {
      optimizer_->set_stream(make_stream(
          mesh->device(),
          "optimizer",
          {.delay_seed = 5, .max_delay_us = 300}));
    }
  }

  /// In step 1 one group has no gradient, in step 2 only two have one, and in
  /// step 3 only the last. In step 4 the first is skipped, although it has one.
  /// So groups change their places and slots.
  /// @param between  is called before the update; states are prefetched in
  ///   even steps.
  void step(int step, const std::function<void()>& between = {}) {
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      if ((step == 1 && i == 1) || (step == 2 && i != 2 && i != 5) ||
          (step == 3 && i != 5)) {
        continue;
      }
      ParamGroup& group = *groups_[i];
      const at::Tensor flat = at::zeros({group.layout().numel()});
      for (std::int64_t p = 0; p < 2 && group.mesh()->rank() == 0; ++p) {
        const std::int64_t n = group.layout().tensor_numel(p);
        flat.narrow(0, group.layout().tensor_offset(p), n)
            .copy_(at::randn(
                {n},
                at::detail::createCPUGenerator(100 * step + 10 * i + p),
                at::kFloat));
      }
      group.gradients().reduce(
          flat.to(group.mesh()->device()),
          group.plan_reduction(true, true));
    }
    if (step % 2 == 0) {
      optimizer_->prefetch_states();
    }
    if (between) {
      between();
    }
    Optimizer::OfParameters without_gradient;
    if (step == 4) {
      without_gradient.assign(groups_.size(), {false, false});
      without_gradient.front() = {true, true};
    }
    optimizer_->step(
        0.01,
        at::scalar_tensor(
            0.5F,
            at::TensorOptions(groups_.front()->mesh()->device())),
        without_gradient);
    optimizer_->zero_grad();
  }

  /// Returns all weights and states of this rank.
  std::map<std::string, at::Tensor> values() const {
    optimizer_->wait();
    optimizer_->wait_for_states();
    std::map<std::string, at::Tensor> values;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      for (const NamedShard& shard : groups_[i]->main_shards()) {
        values["weight/" + shard.name()] = shard.tensor.cpu().clone();
      }
      for (const auto& [role, shards] : optimizer_->state_shards(i)) {
        for (const NamedShard& shard : shards) {
          values[role + "/" + shard.name()] = shard.tensor.cpu().clone();
        }
      }
    }
    return values;
  }

  Optimizer& optimizer() { return *optimizer_; }

 private:
  std::vector<std::unique_ptr<ParamGroup>> owned_;
  std::vector<ParamGroup*> groups_;
  std::unique_ptr<Optimizer> optimizer_;
};

void expect_equal(
    const std::map<std::string, at::Tensor>& got,
    const std::map<std::string, at::Tensor>& want,
    const std::string& where) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [key, tensor] : want) {
    EXPECT_TRUE(tensor.equal(got.at(key))) << key << " " << where;
  }
}

ParameterRules adamw(StateFormat format) {
  return {.rest = {.weight_decay = 0.1, .state_dtype = format}};
}

ParameterRules sgd(double momentum) {
  return {
      .rest = {
          .algorithm = Algorithm::sgd,
          .weight_decay = 0.1,
          .momentum = momentum}};
}

std::vector<Case> cases() {
  ParameterRules formats = adamw(StateFormat::float32);
  formats.rules = {
      {.pattern = "weight[02]", .state_dtype = StateFormat::int8},
      {.pattern = "weight3", .state_dtype = StateFormat::bfloat16}};
  ParameterRules algorithms = adamw(StateFormat::float32);
  algorithms.rules = {
      {.pattern = "bias|weight4", .algorithm = Algorithm::sgd, .momentum = 0.9},
      {.pattern = "weight5", .lr_mult = 0.5}};
  return {
      {"AdamW", adamw(StateFormat::float32)},
      {"Overlapped",
       adamw(StateFormat::float32),
       at::kFloat,
       false,
       /*overlaps=*/true},
      {"BFloat16", adamw(StateFormat::bfloat16)},
      {"Int8", adamw(StateFormat::int8)},
      {"Int8Rounded",
       adamw(StateFormat::int8),
       at::kBFloat16,
       /*rounds=*/true,
       /*overlaps=*/true},
      {"Rounded", adamw(StateFormat::float32), at::kBFloat16, /*rounds=*/true},
      {"Sgd", sgd(0.9)},
      {"SgdWithoutMomentum", sgd(0)},
      {"Formats", formats},
      {"Algorithms", algorithms}};
}

class StatesOnHost : public ::testing::TestWithParam<Case> {};

void check_equal(
    const Case& of,
    const std::shared_ptr<Mesh>& mesh,
    const std::string& strategy) {
  constexpr int kSteps = 5;
  Model want(mesh, strategy, of, /*offloads=*/false);
  Model got(mesh, strategy, of, /*offloads=*/true);
  for (int step = 0; step < kSteps; ++step) {
    want.step(step);
    got.step(step);
    if (step == 1) {
      expect_equal(got.values(), want.values(), "after two steps");
    }
  }
  expect_equal(
      got.values(),
      want.values(),
      "with " + strategy + " on rank " + std::to_string(mesh->rank()));
}

TEST_P(StatesOnHost, L3_EqualThoseOnTheDevice) {
  check_equal(GetParam(), Mesh::single(at::kCPU), "zero3");
  run_ranks(2, [&](RankContext& context) {
    for (const std::string strategy : {"zero0", "zero1", "zero2", "zero3"}) {
      check_equal(GetParam(), context.mesh({{"dp", 2}}, strategy), strategy);
    }
  });
  run_ranks(4, [&](RankContext& context) {
    const auto mesh = context.mesh({{"replicate", 2}, {"shard", 2}});
    check_equal(GetParam(), mesh, "hsdp");
  });
}

TEST_P(StatesOnHost, EqualThoseOnAGpu) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  check_equal(GetParam(), Mesh::single(at::Device(at::kCUDA, 0)), "zero3");
}

INSTANTIATE_TEST_SUITE_P(
    Optimizers,
    StatesOnHost,
    ::testing::ValuesIn(cases()),
    [](const auto& info) { return info.param.name; });

// Values written between steps, also after a prefetch, are in the next update,
// and no later copy overwrites them.
TEST(StatesOnHostMemory, L3_MayBeWrittenBetweenSteps) {
  const auto trained = [](bool offloads) {
    const Case of{.rules = adamw(StateFormat::float32)};
    Model model(Mesh::single(at::kCPU), "zero3", of, offloads);
    const auto halve = [&] {
      model.optimizer().wait_for_states();
      for (const std::size_t group : {2, 3}) {
        for (const auto& [role, shards] :
             model.optimizer().state_shards(group)) {
          for (const NamedShard& shard : shards) {
            at::Tensor(shard.tensor).mul_(0.5);
          }
        }
      }
    };
    for (int step = 0; step < 5; ++step) {
      model.step(step, [&] {
        std::this_thread::sleep_for(20ms);  // most likely all is uploaded
        halve();
      });
      halve();
    }
    return model.values();
  };
  expect_equal(trained(true), trained(false), "with halved states");
}

TEST(StatesOnHostMemory, TheDeviceHasTwoBuffersOfTheLargestGroup) {
  const Case of{.rules = adamw(StateFormat::float32)};
  const auto mesh = Mesh::single(at::kCPU);
  Model on_device(mesh, "zero3", of, /*offloads=*/false);
  Model offloaded(mesh, "zero3", of, /*offloads=*/true);
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < kShapes.size(); ++i) {
    std::int64_t nbytes = 0;
    for (const auto& [name, state] : on_device.optimizer().state(i)) {
      nbytes += static_cast<std::int64_t>(state.nbytes());
    }
    largest = std::max(largest, nbytes);
  }
  EXPECT_EQ(on_device.optimizer().host_state_nbytes(), 0);
  EXPECT_EQ(offloaded.optimizer().state_nbytes(), 2 * largest);
  EXPECT_EQ(
      offloaded.optimizer().host_state_nbytes(),
      on_device.optimizer().state_nbytes());
}

TEST(StatesOnHostMemory, RefusesMuon) {
  const Case of{.rules = {.rest = {.algorithm = Algorithm::muon}}};
  EXPECT_THAT(
      message_of([&] {
        const Model refused(Mesh::single(at::kCPU), "zero3", of, true);
      }),
      HasSubstr("states of Muon cannot be offloaded; use adamw or sgd"));
}

}  // namespace
}  // namespace flatshard::testing
