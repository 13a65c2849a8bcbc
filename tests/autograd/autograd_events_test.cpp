// Tests AutogradEvents without a Runtime, Scheduler or stream. A listener
// records the events.
#include "flatshard/autograd/autograd_events.h"
#include "flatshard/core/error.h"
#include "flatshard/fully_shard/unit_contents.h"
#include "tests/support/ranks.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RankContext;

class NotingListener : public AutogradListener {
 public:
  AutogradEvents* events = nullptr;
  std::vector<std::string> heard;
  std::map<UnitId, int> calls;  ///< of the last backward

  void on_tensor_grad(const WatchedTensor& tensor) override {
    events->tensor_grad(tensor);
  }
  void on_parameter_done(ParameterRef parameter) override {
    events->parameter_done(parameter);
  }
  void on_task_end(TaskId task) override {
    heard.push_back(events->task_end(task) ? "over" : "not over");
  }

  void feed(const ScheduleEvent& event) override {
    std::string text = names[event.kind];
    if (event.kind == EventKind::task_begin) {
      calls = {event.calls.begin(), event.calls.end()};
    }
    if (event.unit != kNoUnit) {
      text += fmt::format(" {}", event.unit);
    }
    for (const auto& [unit, count] : event.expected) {
      text += fmt::format(" {}:{}", unit, count);
    }
    heard.push_back(text);
  }
  void forward_begins(UnitId unit, bool outermost) override {
    heard.push_back(outermost ? "outermost" : "inner");
  }
  void task_begins() override { heard.push_back("task"); }
  void backward_begins(UnitId unit, CallId call) override {
    heard.push_back(fmt::format("call {}", call));
  }

  std::vector<std::string> take() { return std::exchange(heard, {}); }

 private:
  std::map<EventKind, std::string> names{
      {EventKind::forward_begin, "begin"},
      {EventKind::forward_end, "end"},
      {EventKind::recompute_begin, "again"},
      {EventKind::recompute_end, "again ended"},
      {EventKind::task_begin, "grads"},
      {EventKind::backward_begin, "backward"},
      {EventKind::wgrad_done, "wgrad"},
      {EventKind::inputs_done, "inputs"},
      {EventKind::task_end, "task end"}};
};

/// Units of two parameters each, [4] ones, of which y = x * first is computed.
struct WatchedUnits {
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<at::Tensor> firsts;
  std::shared_ptr<NotingListener> listener = std::make_shared<NotingListener>();
  std::unique_ptr<AutogradEvents> events;

  WatchedUnits(const RankContext& context, int num_units) {
    const auto mesh = context.mesh();
    for (int u = 0; u < num_units; ++u) {
      GroupSpec spec{
          .name = fmt::format("unit{}", u),
          .mesh = mesh,
          .strategy = Strategy::named("zero0", 1)};
      for (const char* name : {"first", "spare"}) {
        const at::Tensor values = at::ones({4});
        spec.parameters.push_back(
            {.names = {name},
             .shape = {4},
             .precision = Precision::full(),
             .values = values,
             .tensor = values.clone().requires_grad_()});
      }
      firsts.push_back(spec.parameters.front().tensor);
      UnitContents contents =
          make_unit_contents(std::move(spec), {}, Initializer(0));
      units.push_back(std::make_unique<Unit>(
          u,
          fmt::format("unit{}", u),
          nullptr,
          std::move(contents.groups),
          std::move(contents.parameters)));
    }
    events = std::make_unique<AutogradEvents>(units, *listener);
    listener->events = events.get();
    events->install_hooks(listener);
  }

  at::Tensor call(UnitId unit, const at::Tensor& x) {
    events->forward_begin(unit, {x});
    const at::Tensor y = x * firsts[unit];
    events->forward_end(unit, {y}, /*more_follow=*/false);
    return y;
  }
};

TEST(AutogradEvents, HooksInEventsOut) {
  testing::run_ranks(1, [](const RankContext& context) {
    WatchedUnits watched(context, 2);
    EXPECT_FALSE(watched.events->is_open());
    const at::Tensor y = watched.call(1, watched.call(0, at::ones({4})));
    EXPECT_THAT(
        watched.listener->take(),
        ElementsAre(
            "outermost",
            "begin 0",
            "end 0",
            "outermost",
            "begin 1",
            "end 1"));
    y.sum().backward();
    // `spare` of each unit does not contribute to the loss.
    EXPECT_THAT(
        watched.listener->take(),
        ElementsAre(
            "task",
            "grads 0:1 1:1",
            "call 1",
            "backward 1",
            "wgrad 1",
            "inputs 1",
            "call 0",
            "backward 0",
            "wgrad 0",
            "task end",
            "over"));
    EXPECT_FALSE(watched.events->in_task());
    EXPECT_TRUE(watched.units[0]->gradients().num_pending() == 1);
    EXPECT_FALSE(watched.units[0]->parameters()[0].tensor.grad().defined());
  });
}

// One call returns a tensor, and the unit's next call consumes it.
TEST(AutogradEvents, ATensorIsUndoneBackwards) {
  testing::run_ranks(1, [](const RankContext& context) {
    WatchedUnits watched(context, 1);
    const at::Tensor y = watched.call(0, watched.call(0, at::ones({4})));
    watched.listener->take();
    y.sum().backward();
    EXPECT_THAT(
        watched.listener->take(),
        ElementsAre(
            "task",
            "grads 0:1",
            "call 1",
            "backward 0",
            "inputs 0",
            "call 0",
            "backward 0",
            "wgrad 0",
            "task end",
            "over"));
  });
}

// A backward may start at a unit's own output, as in activation checkpointing.
// The engine does not count its root node.
TEST(AutogradEvents, R3_AllCallsOfABackwardAreCounted) {
  testing::run_ranks(1, [](const RankContext& context) {
    for (const bool with_loss : {true, false}) {
      WatchedUnits watched(context, 1);
      const at::Tensor y = watched.call(0, watched.call(0, at::ones({4})));
      with_loss ? y.sum().backward() : y.backward(at::ones({4}));
      EXPECT_THAT(watched.listener->calls, ElementsAre(::testing::Pair(0, 2)));
    }
  });
}

TEST(AutogradEvents, ForwardsAreOpenUntilTheyEndOrFail) {
  testing::run_ranks(1, [](const RankContext& context) {
    WatchedUnits watched(context, 2);
    watched.events->forward_begin(0, {});
    watched.events->forward_begin(1, {});
    EXPECT_TRUE(watched.events->is_open(0) && watched.events->is_open(1));
    watched.events->forward_error(0);  // not the innermost: had not begun
    EXPECT_TRUE(watched.events->is_open(0));
    watched.events->forward_error(1);
    EXPECT_FALSE(watched.events->is_open(1));
    const auto ended = watched.events->forward_end(0, {}, false);
    EXPECT_TRUE(ended.outermost);
    EXPECT_FALSE(ended.needs_backward || watched.events->in_forward());
    EXPECT_THAT(
        watched.listener->take(),
        ElementsAre(
            "outermost",
            "begin 0",
            "inner",
            "begin 1",
            "end 1",
            "end 0"));
    try {
      watched.events->forward_end(0, {}, false);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("unit0 ended but never started"));
    }
  });
}

// A loop that only evaluates, without no_grad.
TEST(AutogradEvents, ForwardsWithoutABackwardAreForgotten) {
  testing::run_ranks(1, [](const RankContext& context) {
    WatchedUnits watched(context, 2);
    for (int i = 0; i < 20; ++i) {
      watched.call(1, watched.call(0, at::ones({4})));
      watched.events->forget_dead_tensors();
      EXPECT_EQ(watched.events->num_remembered(), 0);
    }
    const at::Tensor kept = watched.call(0, at::ones({4}));
    watched.events->forget_dead_tensors();
    EXPECT_EQ(watched.events->num_remembered(), 2);  // its call and itself
  });
}

TEST(AutogradEvents, HooksOfADestroyedOneDoNothing) {
  testing::run_ranks(1, [](const RankContext& context) {
    WatchedUnits watched(context, 1);
    const at::Tensor y = watched.call(0, at::ones({4}));
    const std::weak_ptr<NotingListener> listener = watched.listener;
    watched.events.reset();
    watched.listener.reset();
    EXPECT_TRUE(listener.expired());  // no hook kept it
    y.sum().backward();
    EXPECT_TRUE(watched.firsts[0].grad().defined());
  });
}

}  // namespace
}  // namespace flatshard
