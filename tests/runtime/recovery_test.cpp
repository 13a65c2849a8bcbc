// Tests the runtime's promises in addition to gradients: recovery after
// exceptions, errors that name their cause, recompute, a trace that replays,
// stable addresses, and an end that leaves nothing.
#include "tests/runtime/twin.h"

#include "flatshard/core/error.h"
#include "flatshard/nn/recompute.h"
#include "flatshard/schedule/simulate.h"
#include "tests/support/sum_order.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>

namespace flatshard {
namespace {

using testing::CellImpl;
using testing::for_strategies;
using testing::forward_backward;
using testing::Lab;
using testing::LabImpl;
using testing::RankContext;
using testing::run_ranks;
using testing::Twin;

// Returns the message and code of the Error that `action` throws.
template <class F>
std::pair<ErrorCode, std::string> error_of(F&& action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {ErrorCode::internal, "nothing was thrown"};
}

void throw_in_forward(Twin& twin, int cell) {
  CellImpl& failing = *twin.sharded->cells[cell];
  const auto body = failing.body;
  failing.body = [](CellImpl& c, at::Tensor x) -> at::Tensor {
    c.standard(x);
    throw std::runtime_error("lost in forward");
  };
  EXPECT_THROW(twin.run_sharded(forward_backward), std::runtime_error);
  failing.body = body;
}

void throw_in_backward(Twin& twin, int cell) {
  CellImpl& failing = *twin.sharded->cells[cell];
  const auto body = failing.body;
  failing.body = [](CellImpl& c, at::Tensor x) {
    const at::Tensor y = at::tanh(c.up(x));
    y.register_hook(std::function<void(at::Tensor)>(
        [](const at::Tensor&) { throw std::runtime_error("lost"); }));
    return y * c.gain + x;
  };
  EXPECT_ANY_THROW(twin.run_sharded(forward_backward));
  failing.body = body;
}

TEST(Recovery, R4_ForwardThatThrows) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    for (const int cell : {0, 1, 3}) {
      twin.step(forward_backward);
      throw_in_forward(twin, cell);
      throw_in_forward(twin, cell);
      EXPECT_FALSE(twin.runtime->scheduler().in_forward());
    }
    twin.step(forward_backward);
    // Gradients that were there before a failed forward stay.
    twin.run(forward_backward);
    throw_in_forward(twin, 2);
    twin.step(forward_backward);
    twin.step(forward_backward);
  });
}

TEST(Recovery, BackwardThatThrows) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    for (const int cell : {0, 1, 3}) {
      throw_in_backward(twin, cell);
      twin.step(forward_backward);
    }
    // All gradients of the step are dropped with a failed backward.
    twin.run_sharded(forward_backward);
    throw_in_backward(twin, 2);
    throw_in_forward(twin, 1);
    throw_in_backward(twin, 1);
    twin.step(forward_backward);
    throw_in_backward(twin, 1);
    twin.runtime->reset();
    twin.expect_rest();
    twin.step(forward_backward);
  });
}

TEST(Recovery, BackwardThatThrowsInsideRecompute) {
  const auto configure = [](LabImpl& lab) {
    lab.body = [](LabImpl& l, at::Tensor x) {
      return nn::checkpoint(
                 l,
                 [&l](const at::Tensor& in) { return l.chain(in); },
                 x) *
             l.scale;
    };
  };
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, configure, options);
    twin.step(forward_backward);
    throw_in_backward(twin, 2);
    twin.step(forward_backward);
    twin.step(forward_backward);
  });
}

TEST(Recovery, StepBetweenForwardAndBackward) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    const auto [code, message] = error_of([&] {
      twin.run_sharded([](Lab& model, const Twin& t, int rank) {
        t.backward(model(t.input(rank, 0)));
        const at::Tensor out = model(t.input(rank, 1));
        t.sgd->step(0.0);
        t.sgd->zero_grad();
        t.backward(out);
      });
    });
    EXPECT_EQ(code, ErrorCode::usage);
    EXPECT_NE(message.find("unit root"), std::string::npos) << message;
    twin.step(forward_backward);
    // The same with a write by somebody else.
    const auto [code2, message2] = error_of([&] {
      twin.run_sharded([](Lab& model, const Twin& t, int rank) {
        const at::Tensor out = model(t.input(rank, 1));
        at::Tensor main = t.group_of("scale").weights().main().local();
        main.mul_(1.0);
        t.backward(out);
      });
    });
    EXPECT_EQ(code2, ErrorCode::usage) << message2;
    twin.step(forward_backward);
  });
}

TEST(Recovery, B43_ReplacedStorageIsNamed) {
  for (const char* strategy : {"zero3", "zero2", "zero1", "zero0"}) {
    run_ranks(2, [&](const RankContext& context) {
      Twin twin(context, {}, {.strategy = strategy});
      twin.step(forward_backward);
      at::Tensor gain = twin.sharded->cells[1]->gain;
      const at::Tensor own = gain.detach();
      gain.set_data(at::ones({12}));
      const auto [code, message] =
          error_of([&] { twin.run_sharded(forward_backward); });
      EXPECT_EQ(code, ErrorCode::usage) << strategy;
      EXPECT_NE(message.find("cell1.gain"), std::string::npos) << message;
      EXPECT_NE(message.find("copy_"), std::string::npos) << message;
      // Given back, training continues as if nothing had been.
      gain.set_data(own);
      twin.step(forward_backward);
      twin.step(forward_backward);
    });
  }
}

// Tensors that the graph of a backward reads stay until the weights change,
// also through another forward.
TEST(Recovery, SecondDerivatives) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    const auto penalty = [](Lab& model, const Twin& t, int rank) {
      const at::Tensor x = t.input(rank).requires_grad_(true);
      const at::Tensor slope = torch::autograd::grad(
          {model(x).square().mean()},
          {x},
          {},
          /*retain_graph=*/true,
          /*create_graph=*/true)[0];
      (t.loss(slope * 10) + t.loss(model(t.input(rank)))).backward();
    };
    for (auto* model : {&twin.sharded, &twin.plain}) {
      for (auto& cell : (*model)->cells) {
        cell->body = [](CellImpl& c, at::Tensor x) {
          return x + at::tanh(x * c.gain);
        };
      }
    }
    twin.may_keep_weights = true;
    twin.step(penalty);
    twin.step(penalty);
    twin.may_keep_weights = false;
    twin.step(forward_backward);
  });
}

TEST(Recovery, ForeignWritesAreSeen) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    for (const char* name : {"cell1.up.weight", "scale"}) {
      ParamGroup& group = twin.group_of(name);
      const std::int64_t generation = group.weights().version();
      for (NamedShard& shard : group.main_shards()) {
        if (shard.name() == name) {
          shard.tensor.mul_(1.5);
        }
      }
      {
        const at::NoGradGuard no_grad;
        twin.plain_parameters.at(name).mul_(1.5);
      }
      twin.step(forward_backward);
      EXPECT_GT(group.weights().version(), generation);
    }
  });
}

// -- nested values -----------------------------------------------------------

struct Pair {
  at::Tensor first;
  std::vector<at::Tensor> rest;
  std::string note;
};

template <class F>
void for_each_tensor(const Pair& pair, F&& fn) {
  nn::for_each_tensor(pair.first, fn);
  nn::for_each_tensor(pair.rest, fn);
}

using Bag = std::map<std::string, std::tuple<at::Tensor, Pair>>;

// A unit with nested inputs and outputs; `weight` is frozen on demand.
class NestImpl : public nn::Module {
 public:
  NestImpl() {
    weight_ = declare_parameter("weight", {6, 6}, InitSpec::normal(0, 0.5F));
  }
  Bag forward(const Bag& in) {
    Bag out;
    for (const auto& [key, value] : in) {
      const auto& [x, pair] = value;
      const at::Tensor y = at::matmul(x, weight_) + pair.rest.at(0);
      out[key] = {at::tanh(y), Pair{pair.first * 2, {y, x}, "kept"}};
    }
    return out;
  }

 private:
  at::Tensor weight_;
};
FLATSHARD_MODULE(Nest);

class NestedImpl : public nn::Module {
 public:
  NestedImpl() {
    for (int i = 0; i < 3; ++i) {
      nests.push_back(register_module("nest" + std::to_string(i), Nest()));
    }
  }
  std::optional<Bag> forward(const at::Tensor& x) {
    Bag bag;
    for (const char* key : {"a", "b"}) {
      bag[key] = {x, Pair{x, {x, x}, ""}};
    }
    for (Nest& nest : nests) {
      bag = nest(bag);
    }
    return bag;
  }
  std::vector<Nest> nests;
};
FLATSHARD_MODULE(Nested);

TEST(Recovery, R27_NestedInputsAndOutputs) {
  run_ranks(2, [](const RankContext& context) {
    Nested sharded;
    Nested plain;
    const at::Tensor x = at::arange(12, at::kFloat).view({2, 6}) / 12;
    const at::Tensor start = at::arange(36, at::kFloat).view({6, 6}) / 40 - 0.4;
    for (auto* model : {&sharded, &plain}) {
      nn::materialize(
          **model,
          at::kCPU,
          at::kFloat,
          [&](const std::string&, const InitSpec&, at::Tensor& t) {
            t.copy_(start);
          });
    }
    FullyShardOptions options{.group = {.precision = Precision::full()}};
    for (Nest& nest : sharded->nests) {
      options.units.push_back(nest.get());
    }
    const auto runtime = fully_shard(*sharded, context.mesh(), options);
    const auto run = [&](Nested& model) {
      const std::optional<Bag> bag = model(x);
      // One output of the last unit and not the others; one per key.
      const at::Tensor loss = std::get<0>(bag->at("a")).sum() +
                              std::get<1>(bag->at("b")).rest[0].square().sum();
      loss.backward();
    };
    for (int step = 0; step < 3; ++step) {
      run(sharded);
      run(plain);
      runtime->synchronize();
      EXPECT_TRUE(runtime->scheduler().resting());
      for (const ParamGroup* group : runtime->groups()) {
        ASSERT_TRUE(group->gradients().reduced().exists());
        for (const auto& shard :
             group->shards_of(group->gradients().reduced().local())) {
          const at::Tensor whole = plain->named_parameters()[shard.name()];
          const at::Tensor want = whole.grad().flatten().narrow(
              0,
              shard.begin,
              shard.tensor.numel());
          // Three layers, forward and backward.
          const double tolerance = testing::sum_tolerance(
              {.addends = 6,
               .in_a_row = 2 * 3,
               .size = want.abs().max().item<double>()});
          EXPECT_LE(
              (shard.tensor - want).abs().max().item<double>(),
              tolerance);
        }
      }
      runtime->zero_grad();
      for (auto& p : plain->parameters()) {
        p.mutable_grad() = at::Tensor();
      }
    }
  });
}

// -- end ---------------------------------------------------------------------

TEST(Recovery, B38_DestroyedRuntimeLeavesAUsableModule) {
  run_ranks(2, [](const RankContext& context) {
    Twin twin(context, [](LabImpl& lab) {
      for (auto& cell : lab.cells) {
        // A backward that reads no weight.
        cell->body = [](CellImpl& c, at::Tensor x) { return x * 2 + c.gain; };
      }
      lab.body = [](LabImpl& l, at::Tensor x) { return l.chain(x) + l.scale; };
    });
    twin.step(forward_backward);
    const at::Tensor loss = twin.sharded(twin.input(0)).sum();
    twin.sgd.reset();
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> buffers;
    for (const ParamGroup* group : twin.runtime->groups()) {
      buffers.push_back(
          group->weights().main().local().storage().getWeakStorageImpl());
      buffers.push_back(
          group->weights().compute().local().storage().getWeakStorageImpl());
    }
    const std::weak_ptr<Runtime> weak = twin.runtime;
    twin.runtime.reset();
    EXPECT_TRUE(weak.expired());
    for (const auto& buffer : buffers) {
      EXPECT_TRUE(buffer.expired());
    }
    for (const auto& p : nn::named_parameters(*twin.sharded)) {
      const auto owner = ParameterStorage::owner_of(p.tensor);
      EXPECT_TRUE(owner && owner->retired) << p.name;
    }
    // Hooks of a graph that is still there do nothing; the gradients arrive
    // where plain autograd puts them.
    loss.backward();
    EXPECT_TRUE(twin.sharded->cells[0]->gain.grad().defined());
    // With separate memory the modules are plain ones.
    for (auto& p : nn::named_parameters(*twin.sharded)) {
      p.tensor.mutable_grad() = at::Tensor();
      nn::set_parameter_data(
          p.tensor,
          twin.plain_parameters.at(p.name).detach().clone());
    }
    for (auto* model : {&twin.sharded, &twin.plain}) {
      for (auto& cell : (*model)->cells) {
        cell->body = [](CellImpl& c, at::Tensor x) { return c.standard(x); };
      }
      (*model)(twin.input(0)).square().mean().backward();
    }
    for (auto& p : nn::named_parameters(*twin.sharded)) {
      const at::Tensor expected = twin.plain_parameters.at(p.name).grad();
      ASSERT_EQ(p.tensor.grad().defined(), expected.defined()) << p.name;
      if (expected.defined()) {
        EXPECT_TRUE(at::equal(p.tensor.grad(), expected)) << p.name;
      }
    }
  });
}

}  // namespace
}  // namespace flatshard
