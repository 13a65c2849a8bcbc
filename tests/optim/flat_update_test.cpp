// The update loops against torch's own optimizers in float64.
#include "flatshard/optim/flat_update.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace flatshard {
namespace {

constexpr int kSteps = 5;

// A run of elements with one weight decay.
struct DecayRun {
  std::int64_t end = 0;
  float weight_decay = 0;
};

struct UpdateCase {
  std::int64_t numel;
  at::ScalarType grad = at::kFloat;
  std::vector<DecayRun> decay;
  double grad_scale = 1;

  // Returns one range per run, and the rows of a step.
  std::vector<UpdateRange> ranges() const {
    std::vector<UpdateRange> ranges;
    for (std::size_t i = 0; i < decay.size(); ++i) {
      ranges.push_back({decay[i].end, static_cast<std::int32_t>(i)});
    }
    return decay.size() == 1 ? std::vector<UpdateRange>() : ranges;
  }
  template <class Step>
  std::vector<UpdateRow> rows(Step step) const {
    std::vector<UpdateRow> rows;
    for (const DecayRun& run : decay) {
      step.weight_decay = run.weight_decay;
      rows.push_back(step.row());
    }
    return rows;
  }
};

std::vector<UpdateCase> cases() {
  return {
      {1, at::kFloat, {{1, 0.1F}}},
      {16, at::kBFloat16, {{16, 0.0F}}},
      {1000, at::kHalf, {{7, 0.5F}, {1000, 0.0F}}},
      {1024, at::kFloat, {{1024, 0.1F}}, 0.25},
      {1025, at::kBFloat16, {{1, 0.0F}, {1024, 0.3F}, {1025, 0.0F}}, 0.5},
      // Split between threads, and inside a block of the loop.
      {70001, at::kFloat, {{40000, 0.2F}, {40001, 0.0F}, {70001, 0.4F}}}};
}

at::Tensor randn(std::int64_t n, std::uint64_t seed) {
  return at::randn({n}, at::detail::createCPUGenerator(seed), at::kFloat);
}

at::Tensor gradient(const UpdateCase& c, int step) {
  return (randn(c.numel, 100 + step) * 0.3).to(c.grad);
}

// Returns one float64 parameter per run.
std::vector<at::Tensor> split(const UpdateCase& c, const at::Tensor& flat) {
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (const DecayRun& range : c.decay) {
    parts.push_back(
        flat.narrow(0, begin, range.end - begin).to(at::kDouble).clone());
    begin = range.end;
  }
  return parts;
}

void set_gradients(
    const UpdateCase& c,
    std::vector<at::Tensor>& parameters,
    int step) {
  const auto grads = split(c, gradient(c, step).to(at::kDouble) * c.grad_scale);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = grads[i];
  }
}

// torch's parameters, one group per run.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> torch_groups(
    const std::vector<at::Tensor>& parameters,
    const std::function<Options(std::size_t)>& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    groups.emplace_back(
        std::vector<at::Tensor>{parameters[i]},
        std::make_unique<Options>(options(i)));
  }
  return groups;
}

FlatUpdate update_of(const UpdateCase& c, at::ScalarType compute) {
  FlatUpdate update;
  update.main = randn(c.numel, 1);
  if (compute != at::kFloat) {
    update.compute = at::zeros({c.numel}, compute);
  }
  update.state0 = at::zeros({c.numel});
  update.ranges = c.ranges();
  if (c.grad_scale != 1) {
    update.grad_scale = at::scalar_tensor(c.grad_scale);
  }
  return update;
}

double lr_of(int step) {
  return 1e-2 * (step + 1);
}

double distance(const at::Tensor& main, const std::vector<at::Tensor>& want) {
  return (main.to(at::kDouble) - at::cat(want)).abs().max().item<double>();
}

void expect_compute_is_rounded(const FlatUpdate& update) {
  if (update.compute.defined()) {
    EXPECT_TRUE(
        update.compute.equal(update.main.to(update.compute.scalar_type())));
  }
}

class FlatUpdates : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::set_num_threads(2); }
};

TEST_P(FlatUpdates, AdamWEqualsTorch) {
  for (const UpdateCase& c : cases()) {
    FlatUpdate update = update_of(c, GetParam());
    update.state1 = at::zeros({c.numel});
    auto parameters = split(c, update.main);
    torch::optim::AdamW torch_adamw(
        torch_groups<torch::optim::AdamWOptions>(
            parameters,
            [&](std::size_t i) {
              return torch::optim::AdamWOptions(1e-3)
                  .betas({0.9, 0.95})
                  .eps(1e-6)
                  .weight_decay(c.decay[i].weight_decay);
            }),
        torch::optim::AdamWOptions(1e-3));
    for (int step = 0; step < kSteps; ++step) {
      set_gradients(c, parameters, step);
      for (auto& group : torch_adamw.param_groups()) {
        group.options().set_lr(lr_of(step));
      }
      torch_adamw.step();
      update.grad = gradient(c, step);
      update.rows = c.rows(AdamWStep{
          .lr = static_cast<float>(lr_of(step)),
          .beta1 = 0.9F,
          .beta2 = 0.95F,
          .eps = 1e-6F,
          .bias_correction1 = static_cast<float>(1 - std::pow(0.9, step + 1)),
          .bias_correction2 =
              static_cast<float>(1 - std::pow(0.95, step + 1))});
      flat_update(Algorithm::adamw, update);
      EXPECT_LT(distance(update.main, parameters), 4e-6)
          << c.numel << " elements, step " << step;
      expect_compute_is_rounded(update);
    }
  }
}

TEST_P(FlatUpdates, SgdEqualsTorch) {
  for (const double momentum : {0.0, 0.9}) {
    for (const UpdateCase& c : cases()) {
      FlatUpdate update = update_of(c, GetParam());
      if (momentum == 0) {
        update.state0 = at::Tensor();
      } else {
        update.state0.fill_(1e3);  // the first step must not read it
      }
      auto parameters = split(c, update.main);
      torch::optim::SGD torch_sgd(
          parameters,
          torch::optim::SGDOptions(1e-3).momentum(momentum));
      for (int step = 0; step < kSteps; ++step) {
        set_gradients(c, parameters, step);
        // torch's decay is part of the gradient; Flatshard's is decoupled.
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          parameters[i].mul_(1 - lr_of(step) * double{c.decay[i].weight_decay});
        }
        torch_sgd.param_groups()[0].options().set_lr(lr_of(step));
        torch_sgd.step();
        update.grad = gradient(c, step);
        update.rows = c.rows(SgdStep{
            .lr = static_cast<float>(lr_of(step)),
            .momentum = static_cast<float>(momentum),
            .first = step == 0});
        flat_update(Algorithm::sgd, update);
        EXPECT_LT(distance(update.main, parameters), 4e-6)
            << c.numel << " elements, step " << step;
        expect_compute_is_rounded(update);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    ComputeDtypes,
    FlatUpdates,
    ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(FlatUpdate, BFloat16MainWeights) {
  FlatUpdate update;
  const at::Tensor start = randn(100, 1).to(at::kBFloat16);
  update.main = start.clone();
  update.grad = randn(100, 2).to(at::kBFloat16);
  update.rows = {SgdStep{.lr = 0.1F, .weight_decay = 0.5F}.row()};
  flat_update(Algorithm::sgd, update);
  const at::Tensor want = start.to(at::kFloat) * (1.0F - 0.1F * 0.5F) -
                          update.grad.to(at::kFloat) * 0.1F;
  EXPECT_TRUE(at::allclose(update.main.to(at::kFloat), want, 1e-2, 1e-6));
}

TEST(FlatUpdate, ZerosStayZero) {
  FlatUpdate update;
  update.main = at::zeros({64});
  update.grad = at::zeros({64});
  update.state0 = at::zeros({64});
  update.state1 = at::zeros({64});
  update.rows = {AdamWStep{
      .lr = 1,
      .weight_decay = 0.1F,
      .beta1 = 0.9F,
      .beta2 = 0.95F,
      .eps = 1e-8F,
      .bias_correction1 = 0.1F,
      .bias_correction2 = 0.05F}
                     .row()};
  flat_update(Algorithm::adamw, update);
  EXPECT_TRUE(update.main.equal(at::zeros({64})));
}

TEST(FlatUpdate, SkippedRangesAreLeftAlone) {
  const std::int64_t n = 3000;
  FlatUpdate update;
  const at::Tensor start = randn(n, 1);
  update.main = start.clone();
  update.compute = at::zeros({n}, at::kBFloat16);
  update.grad = randn(n, 2);
  update.state0 = at::zeros({n});
  update.state1 = at::zeros({n});
  const AdamWStep step{
      .lr = 0.1F,
      .weight_decay = 0.1F,
      .beta1 = 0.9F,
      .beta2 = 0.95F,
      .eps = 1e-8F};
  update.rows = {step.row()};
  flat_update(Algorithm::adamw, update);
  const at::Tensor all = update.main.clone();
  update.main.copy_(start);
  update.compute.zero_();
  update.state0.zero_();
  update.state1.zero_();
  constexpr auto kSkipped = UpdateRange::kSkipped;
  update.ranges = {{5, kSkipped}, {1500, 0}, {2998, kSkipped}, {n, 0}};
  flat_update(Algorithm::adamw, update);
  for (const auto& [begin, end, own] :
       {std::tuple{0, 5, false},
        {5, 1500, true},
        {1500, 2998, false},
        {2998, 3000, true}}) {
    const auto part = [&, begin = begin, end = end](const at::Tensor& t) {
      return t.narrow(0, begin, end - begin);
    };
    EXPECT_TRUE(part(update.main).equal(part(own ? all : start))) << begin;
    for (const at::Tensor& t : {update.compute, update.state0, update.state1}) {
      EXPECT_EQ(part(t).any().item<bool>(), own) << begin;
    }
  }
}

TEST(FlatUpdate, RefusesTensorsThatDoNotFit) {
  FlatUpdate update;
  update.main = at::zeros({8});
  update.grad = at::zeros({8});
  EXPECT_THROW(flat_update(Algorithm::sgd, update), Error);  // no row
  update.rows = {{}};
  EXPECT_THROW(flat_update(Algorithm::adamw, update), Error);  // no state
  EXPECT_NO_THROW(flat_update(Algorithm::sgd, update));
  update.ranges = {{7, 0}};
  EXPECT_THROW(flat_update(Algorithm::sgd, update), Error);
  update.ranges = {{7, 0}, {8, 1}};
  EXPECT_THROW(flat_update(Algorithm::sgd, update), Error);
  update.ranges = {{7, 0}, {8, UpdateRange::kSkipped}};
  EXPECT_NO_THROW(flat_update(Algorithm::sgd, update));
  update.compute = at::zeros({9}, at::kBFloat16);
  EXPECT_THROW(flat_update(Algorithm::sgd, update), Error);
  update.compute = at::Tensor();
  update.grad = at::zeros({16}).slice(0, 0, 16, 2);
  EXPECT_THROW(flat_update(Algorithm::sgd, update), Error);
}

}  // namespace
}  // namespace flatshard
