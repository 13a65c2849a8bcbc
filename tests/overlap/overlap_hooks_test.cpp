// A schedule that runs modules in pieces has to act for the runtime at certain
// moments. There is one test for each row of the table in the description of
// Megatron-FSDP's 1F1B support. The hook's name is the first part of the test's
// name. A pass is driven by hand, without an OverlapRunner.
#include "flatshard/core/error.h"
#include "flatshard/nn/detached.h"
#include "flatshard/overlap/backward_pass.h"
#include "tests/overlap/overlap_toy.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

namespace flatshard::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kNode = 3;

// One microbatch of two blocks, each block as one piece.
struct HandDriven {
  explicit HandDriven(
      const RankContext& context,
      const std::string& strategy = "zero3")
      : trainer(
            {.strategy = strategy,
             .microbatches = 1,
             .layers = 2,
             .max_delay_us = 0,
             .with_runner = false,
             .ends_are_units = false},
            context),
        runtime(trainer.runtime) {
    for (OverlapBlock& block : trainer.model->blocks) {
      blocks.push_back(runtime->unit_of(*block));
    }
    start();
  }

  void start() {
    pass = std::make_unique<BackwardPass>(runtime);
    nodes = std::vector<nn::DetachedNode>(4);
  }
  void forward_block(int l) {
    pass->forward_begin(blocks[l]);
    run_block(l);
    pass->forward_end(blocks[l]);
  }
  void run_block(int l) {
    tokens = nodes[l].forward({tokens}, [&](const nn::TensorList& in) {
      return nn::TensorList{run(l, in[0])};
    })[0];
  }
  at::Tensor run(int l, const at::Tensor& x) {
    return trainer.model->blocks[l]->forward(x);
  }
  void embed() {
    pass->forward_begin(0);
    tokens = nodes[2].forward({}, [&](const nn::TensorList&) {
      return nn::TensorList{trainer.model->embed(at::ones({6, 12}) * 0.3)};
    })[0];
  }
  void head() {
    tokens = nodes[3].forward({tokens}, [&](const nn::TensorList& in) {
      return nn::TensorList{trainer.model->head(in[0], at::zeros({6, 12}))};
    })[0];
    pass->forward_end(0);
  }
  void forward() {
    embed();
    forward_block(0);
    forward_block(1);
    head();
  }
  void open(bool is_last = true) {
    pass->open_backward({.is_last = is_last});
    pass->backward_begin(0);
    grad = nodes[3].backward({at::ones({})})[0];
  }
  void backward_block(int l, bool delays = false) {
    pass->backward_begin(blocks[l]);
    pass->set_delay_wgrad(delays, kNode);
    grad = nodes[l].backward({grad})[0];
    pass->set_delay_wgrad(false);
    pass->backward_end(blocks[l]);
  }
  void close() {
    nodes[2].backward({grad});
    pass->backward_end(0);
    pass->close_backward();
  }
  void step() {
    forward();
    open();
    backward_block(1);
    backward_block(0);
    close();
  }
  nn::TensorList take_gradients() {
    runtime->synchronize();
    nn::TensorList all;
    for (ParamGroup* group : runtime->groups()) {
      all.push_back(group->gradients().reduced().local().clone());
      group->gradients().zero();
    }
    return all;
  }
  // Returns the runtime's actions since the last call.
  std::string actions() {
    const std::string text = to_string(runtime->trace().actions);
    runtime->clear_trace();
    return text;
  }
  int count(EventKind kind) const {
    const auto events = runtime->trace().events;
    return static_cast<int>(
        std::ranges::count(events, kind, &ScheduleEvent::kind));
  }

  OverlapTrainer trainer;
  std::shared_ptr<Runtime> runtime;
  std::vector<UnitId> blocks;
  std::unique_ptr<BackwardPass> pass;
  std::vector<nn::DetachedNode> nodes;
  at::Tensor tokens;
  at::Tensor grad;
};

void with_two_ranks(const std::function<void(HandDriven&)>& test) {
  run_ranks(2, [&](RankContext& context) {
    HandDriven driven(context);
    test(driven);
  });
}

void expect_equal(const nn::TensorList& a, const nn::TensorList& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

TEST(
    HookTable,
    ReplaceParamWithRawIfNeeded_NoCallOfTheRootMakesParametersThere) {
  with_two_ranks([](HandDriven& d) {
    // Without a pass a module's parameters raise an error.
    EXPECT_THROW(d.run(0, at::ones({6, 12})), std::exception);
    d.pass->forward_begin(0);
    d.tokens = at::ones({6, 12});
    d.pass->forward_begin(d.blocks[0]);
    EXPECT_EQ(d.run(0, d.tokens).sizes(), d.tokens.sizes());
    d.pass->forward_end(d.blocks[0]);
    EXPECT_THROW(d.run(0, at::ones({6, 12})), std::exception);
  });
}

TEST(HookTable, PreForwardParamUnshard_ForwardBeginGathersAndAwaits) {
  with_two_ranks([](HandDriven& d) {
    d.embed();
    d.actions();
    d.pass->forward_begin(d.blocks[0]);
    EXPECT_THAT(d.actions(), HasSubstr("await(1)"));
  });
}

TEST(HookTable, PostForwardReleaseModule_ForwardEndReleases) {
  with_two_ranks([](HandDriven& d) {
    d.step();
    d.take_gradients();
    d.start();
    d.embed();
    d.pass->forward_begin(d.blocks[0]);
    d.run_block(0);
    d.actions();
    d.pass->forward_end(d.blocks[0]);
    EXPECT_EQ(d.actions(), "release(1)");
  });
}

TEST(HookTable, PostBackwardReleaseModule_BackwardEndReleases) {
  with_two_ranks([](HandDriven& d) {
    d.forward();
    d.open();
    d.pass->backward_begin(d.blocks[1]);
    d.grad = d.nodes[1].backward({d.grad})[0];
    d.actions();
    d.pass->backward_end(d.blocks[1]);
    EXPECT_EQ(d.actions(), "release(2)");
    d.backward_block(0);
    d.close();
  });
}

TEST(HookTable, PreBackwardParamUnshard_BackwardBeginGathersAndAwaits) {
  with_two_ranks([](HandDriven& d) {
    d.forward();
    d.open();
    d.backward_block(1);
    d.actions();
    d.pass->backward_begin(d.blocks[0]);
    EXPECT_THAT(d.actions(), HasSubstr("await(1)"));
    d.grad = d.nodes[0].backward({d.grad})[0];
    d.pass->backward_end(d.blocks[0]);
    d.close();
  });
}

TEST(HookTable, RootPreBackward_OpenBackwardMakesAllRunsOfTheEngineOne) {
  with_two_ranks([](HandDriven& d) {
    d.forward();
    d.runtime->clear_trace();
    d.open();
    d.backward_block(1);
    d.backward_block(0);
    EXPECT_EQ(d.count(EventKind::task_begin), 1);
    EXPECT_EQ(d.count(EventKind::task_end), 0);
    d.close();
    EXPECT_EQ(d.count(EventKind::task_begin), 1);
    EXPECT_EQ(d.count(EventKind::task_end), 1);
  });
}

TEST(HookTable, RootPostBackward_CloseBackwardReducesTheRootAndJoins) {
  with_two_ranks([](HandDriven& d) {
    d.forward();
    d.open();
    d.backward_block(1);
    d.backward_block(0);
    EXPECT_THAT(d.actions(), ::testing::Not(HasSubstr("reduce(0)")));
    d.close();
    const std::string actions = d.actions();
    EXPECT_THAT(actions, HasSubstr("reduce(0)"));
    EXPECT_THAT(actions, ::testing::EndsWith("join"));
    EXPECT_TRUE(d.runtime->scheduler().resting());
    EXPECT_EQ(d.runtime->executor().slots().pool().num_held(), 0);
  });
}

TEST(HookTable, ProcessPostBackwardGradients_EachParameterIsHeardOfOnce) {
  with_two_ranks([](HandDriven& d) {
    d.runtime->clear_trace();
    d.step();
    // Two blocks of attend (weight, bias), gain, expert; four of the root.
    EXPECT_EQ(d.count(EventKind::wgrad_done), 2 * 4 + 4);
    EXPECT_EQ(d.count(EventKind::wgrad_deferred), 0);
  });
}

TEST(HookTable, ProcessPostBackwardGradients_DelayedOnesAreHeardOfTwice) {
  with_two_ranks([](HandDriven& d) {
    d.forward();
    d.runtime->clear_trace();
    d.open();
    d.backward_block(1, true);
    d.backward_block(0, true);
    // The weights of two linear layers in each block; bias and gain are early.
    EXPECT_EQ(d.count(EventKind::wgrad_deferred), 2 * 2);
    EXPECT_EQ(d.count(EventKind::wgrad_done), 2 * 2 + 2);
    d.close();
    EXPECT_EQ(d.count(EventKind::wgrad_done), 2 * 4 + 4);
  });
}

// -- passes in general
// ---------------------------------------------------------

TEST(BackwardPass, B68_LateWeightGradientsAreNeitherLostNorDoubled) {
  with_two_ranks([](HandDriven& d) {
    d.step();
    const auto want = d.take_gradients();
    // 0: run as asked; 1: left to the close; 2: one block each.
    for (int way = 0; way < 3; ++way) {
      d.start();
      d.forward();
      d.runtime->clear_trace();
      d.open();
      for (const int l : {1, 0}) {
        d.backward_block(l, true);
        EXPECT_EQ(d.pass->num_late(), way == 1 ? (l == 1 ? 2U : 4U) : 2U);
        // Weights are not needed any more.
        EXPECT_THAT(
            d.actions(),
            HasSubstr("release(" + std::to_string(d.blocks[l]) + ")"));
        if (way == 0 || (way == 2 && l == 1)) {
          d.pass->run_wgrads(d.blocks[l], kNode + 1);  // another node's
          d.pass->run_wgrads(d.blocks[1 - l], kNode);  // another unit's
          EXPECT_EQ(d.pass->num_late(), 2U);
          d.pass->run_wgrads(d.blocks[l], kNode);
          d.pass->run_wgrads(d.blocks[l], kNode);
          EXPECT_EQ(d.pass->num_late(), 0U);
        }
      }
      d.close();
      EXPECT_EQ(d.pass->num_late(), 0U);
      expect_equal(d.take_gradients(), want);
    }
  });
}

TEST(BackwardPass, B67_RunsOfTheEngineAreOneBackward) {
  with_two_ranks([](HandDriven& d) {
    d.step();
    const auto want = d.take_gradients();
    d.runtime->clear_trace();
    for (const bool is_last : {false, true}) {
      d.start();
      d.forward();
      d.open(is_last);
      d.backward_block(1);
      d.backward_block(0);
      d.close();
    }
    EXPECT_EQ(d.count(EventKind::task_begin), 2);
    EXPECT_EQ(d.count(EventKind::task_end), 2);
    auto twice = d.take_gradients();
    for (at::Tensor& grad : twice) {
      grad.mul_(0.5);  // the same microbatch again; exact
    }
    expect_equal(twice, want);
  });
}

TEST(BackwardPass, AForwardMayEndWhileTheBackwardOfAnotherPassIsOpen) {
  with_two_ranks([](HandDriven& d) {
    d.step();
    const auto want = d.take_gradients();
    d.start();
    d.forward();
    auto pass = std::move(d.pass);
    auto nodes = std::move(d.nodes);
    const auto swap = [&] {
      std::swap(pass, d.pass);
      std::swap(nodes, d.nodes);
    };
    d.start();
    swap();
    d.pass->open_backward({.is_last = false, .interleaved = true});
    d.pass->backward_begin(0);
    d.grad = d.nodes[3].backward({at::ones({})})[0];
    swap();
    d.forward();
    swap();
    d.backward_block(1);
    d.backward_block(0);
    d.close();
    swap();
    d.open();
    d.backward_block(1);
    d.backward_block(0);
    d.close();
    auto twice = d.take_gradients();
    for (at::Tensor& grad : twice) {
      grad.mul_(0.5);  // the same microbatch again; exact
    }
    expect_equal(twice, want);
  });
}

void expect_usage(const std::function<void()>& call, const char* text) {
  try {
    call();
    ADD_FAILURE() << "expected an error with " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    EXPECT_THAT(error.message(), HasSubstr(text));
  }
}

TEST(BackwardPass, RefusesWhatIsOutOfOrder) {
  with_two_ranks([](HandDriven& d) {
    expect_usage([&] { d.pass->close_backward(); }, "after open_backward");
    expect_usage(
        [&] { d.pass->backward_begin(d.blocks[0]); },
        "had no forward in it");
    d.embed();
    expect_usage([&] { d.pass->open_backward({}); }, "to be over");
    expect_usage([&] { d.pass->forward_begin(0); }, "to run once");
    d.forward_block(0);
    d.forward_block(1);
    d.head();
    expect_usage(
        [&] { d.pass->backward_begin(d.blocks[0]); },
        "expected open_backward");
    d.open();
    const auto other = std::make_unique<BackwardPass>(d.runtime);
    expect_usage(
        [&] { other->open_backward({}); },
        "one open backward at a time");
    d.backward_block(1);
    d.backward_block(0);
    d.close();
  });
}

TEST(BackwardPass, OneThatIsGivenUpLeavesTheNextStepRight) {
  with_two_ranks([](HandDriven& d) {
    d.step();
    const auto want = d.take_gradients();
    for (int stop = 0; stop < 7; ++stop) {
      d.start();
      const std::vector<std::function<void()>> parts{
          [&] { d.embed(); },
          [&] { d.forward_block(0); },
          [&] { d.forward_block(1); },
          [&] { d.head(); },
          [&] { d.open(); },
          [&] { d.backward_block(1, true); },
          [&] { d.backward_block(0); }};
      for (int i = 0; i <= stop; ++i) {
        parts[i]();
      }
      d.pass.reset();
      d.start();
      d.step();
      expect_equal(d.take_gradients(), want);
    }
  });
}

}  // namespace
}  // namespace flatshard::testing
