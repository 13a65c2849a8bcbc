#pragma once
// The actions of a program in addition to its steps, for both kinds of graphs,
// and how runs are compared.
#include "flatshard/graphs/model_graphs.h"
#include "tests/graphs/graph_training.h"

#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <utility>

namespace flatshard::testing {

/// Runs `act` before one step only.
inline GraphHooks before_step(
    int step,
    std::function<void(GraphTraining&)> act) {
  return {
      .before_step =
          [step, act = std::move(act)](GraphTraining& training, int current) {
            if (current == step) {
              act(training);
            }
          }};
}

/// Returns an evaluation before each step.
inline GraphHooks evaluations() {
  return {.before_step = [](GraphTraining& training, int) {
    const at::NoGradGuard no_grad;
    training.forward(90, 0);
  }};
}

inline GraphHooks forward_without_backward() {
  return before_step(5, [](GraphTraining& training) {
    training.forward(93, 0);
  });
}

inline GraphHooks exception_in_a_backward() {
  return before_step(5, [](GraphTraining& training) {
    const at::Tensor bad = training.forward(95, 0) * 1;
    bad.register_hook(std::function<void(at::Tensor)>(
        [](const at::Tensor&) { throw std::runtime_error("on purpose"); }));
    EXPECT_THROW(bad.backward(), std::exception);
  });
}

inline GraphHooks reset_of_the_graphs() {
  return before_step(5, [](GraphTraining& training) {
    training.runtime().graphs().reset();
  });
}

inline GraphHooks reset_of_the_runtime() {
  return before_step(5, [](GraphTraining& training) {
    training.runtime().reset();
  });
}

/// Returns a hook on a module, from step 4 to step 6.
inline GraphHooks hook_for_two_steps(
    std::function<nn::HookHandle(GraphTraining&)> add,
    std::function<void()> afterwards = {}) {
  return {
      .before_step = [add = std::move(add), afterwards = std::move(afterwards)](
                         GraphTraining& training,
                         int step) {
        static thread_local nn::HookHandle hook;  // of one rank
        if (step == 4) {
          hook = add(training);
        } else if (step == 6) {
          hook.remove();
          if (afterwards) {
            afterwards();
          }
        }
      }};
}

inline void expect_same(const GraphRun& eager, const GraphRun& graphs) {
  EXPECT_EQ(eager.losses, graphs.losses);
  ASSERT_EQ(eager.gradients.size(), graphs.gradients.size());
  for (std::size_t i = 0; i < eager.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(eager.gradients[i], graphs.gradients[i]))
        << "gradient " << i;
  }
}

}  // namespace flatshard::testing
