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

struct UpdateCase {
  std::int64_t numel;
  at::ScalarType grad = at::kFloat;
  std::vector<DecayRange> decay;
  double grad_scale = 1;
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

// Returns one float64 parameter per decay range.
std::vector<at::Tensor> split(const UpdateCase& c, const at::Tensor& flat) {
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (const DecayRange& range : c.decay) {
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

// torch's parameters, one group per decay range.
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

FlatUpdate flat_update(const UpdateCase& c, at::ScalarType compute) {
  FlatUpdate update;
  update.main = randn(c.numel, 1);
  if (compute != at::kFloat) {
    update.compute = at::zeros({c.numel}, compute);
  }
  update.state0 = at::zeros({c.numel});
  update.decay = c.decay;
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
    FlatUpdate update = flat_update(c, GetParam());
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
      adamw_update(
          update,
          {.lr = static_cast<float>(lr_of(step)),
           .beta1 = 0.9F,
           .beta2 = 0.95F,
           .eps = 1e-6F,
           .bias_correction1 = static_cast<float>(1 - std::pow(0.9, step + 1)),
           .bias_correction2 =
               static_cast<float>(1 - std::pow(0.95, step + 1))});
      EXPECT_LT(distance(update.main, parameters), 4e-6)
          << c.numel << " elements, step " << step;
      expect_compute_is_rounded(update);
    }
  }
}

TEST_P(FlatUpdates, SgdEqualsTorch) {
  for (const double momentum : {0.0, 0.9}) {
    for (const UpdateCase& c : cases()) {
      FlatUpdate update = flat_update(c, GetParam());
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
        sgd_update(
            update,
            {.lr = static_cast<float>(lr_of(step)),
             .momentum = static_cast<float>(momentum),
             .first = step == 0});
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
  update.decay = {{100, 0.5F}};
  sgd_update(update, {.lr = 0.1F});
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
  update.decay = {{64, 0.1F}};
  adamw_update(
      update,
      {.lr = 1,
       .beta1 = 0.9F,
       .beta2 = 0.95F,
       .eps = 1e-8F,
       .bias_correction1 = 0.1F,
       .bias_correction2 = 0.05F});
  EXPECT_TRUE(update.main.equal(at::zeros({64})));
}

TEST(FlatUpdate, RefusesTensorsThatDoNotFit) {
  FlatUpdate update;
  update.main = at::zeros({8});
  update.grad = at::zeros({8});
  update.decay = {{8, 0.0F}};
  EXPECT_THROW(adamw_update(update, {}), Error);  // no state
  EXPECT_NO_THROW(sgd_update(update, {}));
  update.decay = {{7, 0.0F}};
  EXPECT_THROW(sgd_update(update, {}), Error);
  update.decay = {{8, 0.0F}};
  update.compute = at::zeros({9}, at::kBFloat16);
  EXPECT_THROW(sgd_update(update, {}), Error);
  update.compute = at::Tensor();
  update.grad = at::zeros({16}).slice(0, 0, 16, 2);
  EXPECT_THROW(sgd_update(update, {}), Error);
}

}  // namespace
}  // namespace flatshard
