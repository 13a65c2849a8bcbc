// A program's actions between forward, backward and step: each test runs one on
// a sharded model and on its plain twin and compares.
#include "tests/runtime/gradients_in_slots.h"
#include "tests/runtime/twin.h"

#include "flatshard/comm/forwarding_communicator.h"
#include "flatshard/nn/autograd.h"
#include "flatshard/nn/recompute.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace flatshard {
namespace {

using testing::CellImpl;
using testing::check;
using testing::for_strategies;
using testing::forward_backward;
using testing::GradientsInSlots;
using testing::Lab;
using testing::LabImpl;
using testing::RankContext;
using testing::run_ranks;
using testing::Twin;

TEST(Contract, PlainSteps) {
  check({}, forward_backward);
}

TEST(Contract, UnitThatDoesNotRunKeepsItsWeights) {
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    for (auto* model : {&twin.sharded, &twin.plain}) {
      (*model)->body = [](LabImpl& lab, at::Tensor x) {
        return lab.cells[3](lab.cells[1](lab.cells[0](x))) * lab.scale;
      };
    }
    for (int i = 0; i < 2; ++i) {
      twin.run(forward_backward);
      EXPECT_FALSE(twin.group_of("cell2.gain").gradients().reduced().exists());
      EXPECT_TRUE(twin.group_of("cell1.gain").gradients().reduced().exists());
      twin.update();
    }
  });
}

TEST(Contract, AForwardWaitsOnlyForTheUpdateOfItsUnit) {
  const auto test = [](const RankContext& context) {
    Twin twin(context);
    const auto stream = make_stream(
        at::kCPU,
        "optimizer",
        {.delay_seed = 3, .max_delay_us = 200'000});
    twin.sgd->set_stream(stream);
    twin.run_sharded(forward_backward);
    twin.sgd->step(0.01);
    Event updated;
    updated.record(*stream);
    std::vector<bool> done;
    twin.sharded->body = [&](LabImpl& lab, at::Tensor x) {
      for (testing::Cell& cell : lab.cells) {
        x = cell(x);
        done.push_back(updated.query());
      }
      return x;
    };
    twin.run_sharded(forward_backward);
    EXPECT_FALSE(done.front());
  };
  run_ranks(1, test);  // compute waits
  run_ranks(2, test);  // all-gathers wait
}

TEST(Contract, UnshardWaitsForTheUpdateOfItsUnit) {
  run_ranks(1, [](const RankContext& context) {
    Twin twin(context);
    twin.sgd->set_stream(make_stream(
        at::kCPU,
        "optimizer",
        {.delay_seed = 3, .max_delay_us = 200'000}));
    twin.run(forward_backward);
    twin.sgd->step(0.1);
    const UnitId unit = 4;
    ASSERT_EQ(twin.runtime->units()[unit]->name(), "cell3");
    twin.runtime->gathers().unshard(unit);
    const at::Tensor& gain = twin.sharded->cells[3]->gain;
    const at::Tensor read = gain.detach().clone();
    twin.sgd->wait();
    EXPECT_TRUE(read.equal(gain.detach()));
  });
}

// y = x W^T for a W whose gradient is added to the step's sum, if the runtime
// gives it out.
struct SummingLinear : torch::autograd::Function<SummingLinear> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(
      Context* ctx,
      const at::Tensor& x,
      const at::Tensor& weight,
      const nn::ModuleContextPtr& context) {
    ctx->save_for_backward({x, weight});
    nn::save_context(ctx, context);
    return x.mm(weight.t());
  }
  static Tensors backward(Context* ctx, Tensors grads) {
    const Tensors saved = ctx->get_saved_variables();
    const at::Tensor& g = grads[0];
    const auto gradient = [&] { return g.t().mm(saved[0]); };
    return {
        g.mm(saved[1]),
        nn::deliver_wgrad(
            nn::saved_context(ctx),
            saved[1],
            gradient,
            [&](at::Tensor& grad, bool accumulate) {
              accumulate ? grad.add_(gradient()) : grad.copy_(gradient());
              last_target = grad.const_data_ptr();
            },
            /*adds_to_float32=*/true),
        {}};
  }
  static thread_local const void* last_target;
};
thread_local const void* SummingLinear::last_target = nullptr;

void use_summing_layers(Twin& twin) {
  for (auto* model : {&twin.sharded, &twin.plain}) {
    for (auto& cell : (*model)->cells) {
      cell->body = [](CellImpl& own, const at::Tensor& x) {
        return SummingLinear::apply(
            x * own.gain,
            own.up->weight(),
            own.up->context());
      };
    }
  }
}

// Returns whether the last weight gradient was written to the sum of
// microbatches.
bool last_target_is_in_sum(const Twin& twin) {
  const ParamGroup& group = twin.group_of("cell0.up.weight");
  const at::Tensor sum = group.gradients().reduced().local();
  const auto* const begin = static_cast<const char*>(sum.data_ptr());
  const auto* const target =
      static_cast<const char*>(SummingLinear::last_target);
  return target >= begin && target < begin + sum.nbytes();
}

TEST(Contract, LayersAddToTheSumOfMicrobatches) {
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    use_summing_layers(twin);
    for (int step = 0; step < 2; ++step) {
      twin.run([](Lab& model, const Twin& twin, int rank) {
        for (const int m : {0, 1, 2}) {
          if (&model == &twin.sharded) {
            twin.runtime->set_is_last_microbatch(m == 2);
          }
          twin.backward(model(twin.input(rank, m)));
          // Both calls of a layer, of which one may come first.
          twin.backward(model(model(twin.input(rank, m))));
        }
      });
      if (twin.world == 1) {
        EXPECT_TRUE(last_target_is_in_sum(twin));
      }
      twin.update();
    }
  });
}

TEST(Contract, AnObserverGetsAllGradientsInSlots) {
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    twin.runtime->add_observer(std::make_shared<GradientsInSlots>());
    use_summing_layers(twin);
    twin.run([](Lab& model, const Twin& twin, int rank) {
      for (const int m : {0, 1}) {
        if (&model == &twin.sharded) {
          twin.runtime->set_is_last_microbatch(m == 1);
        }
        twin.backward(model(twin.input(rank, m)));
      }
    });
    if (twin.world == 1) {
      EXPECT_FALSE(last_target_is_in_sum(twin));
    }
    twin.update();
  });
}

TEST(Contract, UnitThatRunsOnlyInAnEarlyMicrobatch) {
  const Twin::Program program = [](Lab& model, const Twin& twin, int rank) {
    // Two microbatches; cell 2 is skipped in the last.
    const bool is_sharded = &model == &twin.sharded;
    const auto body = model->body;
    for (const bool last : {false, true}) {
      if (is_sharded) {
        twin.runtime->set_is_last_microbatch(last);
      }
      model->body = [last](LabImpl& lab, at::Tensor x) {
        for (std::size_t i = 0; i < lab.cells.size(); ++i) {
          x = last && i == 2 ? x : lab.cells[i](x);
        }
        return x * lab.scale;
      };
      twin.backward(model(twin.input(rank, last ? 1 : 0)));
    }
    model->body = body;
  };
  check({}, program);
}

TEST(Contract, ParametersUsedOnOneRankOnly) {
  check({}, [](Lab& model, const Twin& twin, int rank) {
    for (auto& cell : model->cells) {
      cell->body = [rank](CellImpl& c, at::Tensor x) {
        x = c.standard(x);
        return rank == 0 ? x * c.spare.mean() : x;
      };
    }
    forward_backward(model, twin, rank);
    for (auto& cell : model->cells) {
      cell->body = [](CellImpl& c, at::Tensor x) { return c.standard(x); };
    }
  });
}

TEST(Contract, TwoForwardsOneBackward) {
  check({}, [](Lab& model, const Twin& twin, int rank) {
    const at::Tensor a = model(twin.input(rank, 0));
    const at::Tensor b = model(twin.input(rank, 1));
    (twin.loss(a) + twin.loss(b)).backward();
  });
}

TEST(Contract, TwoForwardsTwoBackwards) {
  for (const bool swapped : {false, true}) {
    check({}, [&](Lab& model, const Twin& twin, int rank) {
      const at::Tensor a = model(twin.input(rank, 0));
      const at::Tensor b = model(twin.input(rank, 1));
      twin.backward(swapped ? b : a);
      twin.backward(swapped ? a : b);
    });
  }
}

TEST(Contract, B50_UnitCalledTwiceAndParameterUsedTwice) {
  check(
      [](LabImpl& lab) {
        lab.body = [](LabImpl& l, at::Tensor x) {
          return l.chain(l.cells[1](l.cells[1](x))) * l.scale * l.scale;
        };
        lab.cells[2]->body = [](CellImpl& c, at::Tensor x) {
          return c.up(at::tanh(c.up(x)) * c.gain) * c.gain;
        };
      },
      forward_backward);
}

TEST(Contract, FrozenUnitAndLowRankAdapter) {
  check(
      [](LabImpl& lab) {
        for (auto& p : lab.cells[1]->parameters()) {
          p.set_requires_grad(false);
        }
        // The frozen weight's input gradient comes after the last trainable
        // gradient of its unit.
        for (const int i : {0, 2}) {
          for (auto& p : lab.cells[i]->up->parameters()) {
            p.set_requires_grad(false);
          }
          lab.cells[i]->body = [](CellImpl& c, at::Tensor x) {
            return x + c.up(at::tanh(c.up(x))) * c.gain;
          };
        }
      },
      forward_backward);
}

TEST(Contract, FrozenParameterOfTheRootServesAChild) {
  // The root's only gradient arrives first; its frozen weight is needed later.
  const auto configure = [](LabImpl& lab) {
    lab.cells[1]->share_parameter("tied", *lab.cells[2]->up, "weight");
    lab.cells[2]->up->weight().set_requires_grad(false);
    lab.cells[1]->body = [](CellImpl& c, at::Tensor x) {
      return at::matmul(c.standard(x), c.named_parameters(false)["tied"]);
    };
  };
  check(configure, forward_backward);
}

TEST(Contract, B39_TiedParameterBelongsToTheCommonAncestor) {
  const auto configure = [](LabImpl& lab) {
    lab.cells[3]->share_parameter("tied", *lab.cells[0]->up, "weight");
    lab.cells[3]->body = [](CellImpl& c, at::Tensor x) {
      return at::matmul(c.standard(x), c.named_parameters(false)["tied"]);
    };
  };
  check(configure, forward_backward);
  run_ranks(2, [&](const RankContext& context) {
    const Twin twin(context, configure);
    bool found = false;
    for (const auto& p : twin.runtime->units()[0]->parameters()) {
      found |= p.name == "cell0.up.weight";
    }
    EXPECT_TRUE(found);
    EXPECT_EQ(
        twin.group_of("cell3.tied").parameters().data(),
        twin.group_of("cell0.up.weight").parameters().data());
  });
}

TEST(Contract, B23_EvaluationBetweenForwardAndBackward) {
  check({}, [](Lab& model, const Twin& twin, int rank) {
    const auto evaluate = [&] {
      const at::NoGradGuard no_grad;
      return model(twin.input(rank, 5)).sum().item<double>();
    };
    const auto infer = [&] {
      const c10::InferenceMode inference;
      return model(twin.input(rank, 5)).sum().item<double>();
    };
    const double first = evaluate();
    EXPECT_NEAR(infer(), first, 1e-3);
    twin.backward(model(twin.input(rank, 0)));
    EXPECT_NEAR(infer(), first, 1e-3);
    const at::Tensor out = model(twin.input(rank, 1));
    EXPECT_NEAR(evaluate(), first, 1e-3);
    twin.backward(out);
    EXPECT_NEAR(evaluate(), first, 1e-3);
  });
}

TEST(Contract, EvaluationInTheMiddleOfAccumulation) {
  check({}, [](Lab& model, const Twin& twin, int rank) {
    for (const bool last : {false, true}) {
      if (&model == &twin.sharded) {
        twin.runtime->set_is_last_microbatch(last);
      }
      twin.backward(model(twin.input(rank, last ? 1 : 0)));
      const at::NoGradGuard no_grad;
      model(twin.input(rank, 5));
    }
  });
}

TEST(Contract, OrderThatChangesEveryStep) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    for (std::size_t step = 0; step < 6; ++step) {
      for (auto* model : {&twin.sharded, &twin.plain}) {
        (*model)->body = [step](LabImpl& lab, at::Tensor x) {
          const std::size_t n = lab.cells.size();
          for (std::size_t i = 0; i < n; ++i) {
            x = lab.cells[step % 2 == 0 ? (i + step) % n : n - 1 - i](x);
          }
          return x * lab.scale;
        };
      }
      twin.step(forward_backward);
    }
  });
}

// Runs without the root, so nothing marks the start and end of a forward.
TEST(Contract, BlocksThatAreCalledOneByOne) {
  run_ranks(2, [](const RankContext& context) {
    Twin twin(context);
    for (int step = 0; step < 3; ++step) {
      twin.runtime->clear_trace();
      twin.step([](Lab& model, const Twin& t, int rank) {
        at::Tensor x = t.input(rank);
        for (auto& cell : model->cells) {
          x = cell(x);
          EXPECT_LE(t.runtime->scheduler().num_gathered(), 1);
        }
        t.backward(x);
      });
      const auto actions = twin.runtime->trace().actions;
      if (step > 0) {  // the first one learned the way
        EXPECT_TRUE(to_string(actions).starts_with(
            "gather(1) gather(2) await(1) release(1) gather(3) await(2) "
            "release(2) gather(4) await(3) release(3) await(4) gather'(3)"))
            << to_string(actions);
      }
    }
  });
}

TEST(Contract, CheckpointOverTwoUnits) {
  check(
      [](LabImpl& lab) {
        lab.body = [](LabImpl& l, at::Tensor x) {
          for (const std::size_t first : {0, 2}) {
            x = nn::checkpoint(
                l,
                [&l, first](const at::Tensor& in) {
                  return l.cells[first + 1](l.cells[first](in));
                },
                x);
          }
          return x * l.scale;
        };
      },
      forward_backward);
}

TEST(Contract, ScalarAndEmptyParameters) {
  check(
      [](LabImpl& lab) {
        for (auto& cell : lab.cells) {
          cell->declare_parameter("shift", {}, InitSpec::normal(0, 0.1F));
          cell->declare_parameter("none", {0, 5}, InitSpec::zeros());
          cell->body = [](CellImpl& c, at::Tensor x) {
            const auto own = c.named_parameters(false);
            return c.standard(x) + own["shift"] + own["none"].sum();
          };
        }
      },
      forward_backward);
}

TEST(Contract, R30_InPlaceOnInputsAndOutputs) {
  check(
      [](LabImpl& lab) {
        lab.body = [](LabImpl& l, at::Tensor x) {
          x = at::sigmoid(x * l.scale);  // sigmoid has saved its output
          for (auto& cell : l.cells) {
            x = cell(x);
            x.mul_(0.5).add_(1);
          }
          return x * l.scale;
        };
        // A view: the writes above remove its node from the graph. It is not on
        // the last cell, because that stays unsharded.
        lab.cells[0]->body = [](CellImpl& c, at::Tensor x) {
          return c.standard(x).view({-1, 12});
        };
        lab.cells[1]->body = [](CellImpl& c, at::Tensor x) {
          x.add_(c.gain);
          return c.standard(x);
        };
        lab.cells[2]->body = [](CellImpl& c, at::Tensor x) {
          return x.mul_(c.gain.mean());  // the output is the input
        };
        lab.cells[3]->body = [](CellImpl& c, at::Tensor x) {
          x = c.standard(x);
          x.narrow(1, 0, 2).mul_(3);
          return x.view({-1, 12});
        };
      },
      forward_backward);
}

TEST(Contract, RetainedGraph) {
  check({}, [](Lab& model, const Twin& twin, int rank) {
    const at::Tensor loss = twin.loss(model(twin.input(rank)));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
}

void expect_near(const at::Tensor& got, const at::Tensor& want) {
  const double size = want.abs().max().item<double>();
  EXPECT_LE(
      (got - want).abs().max().item<double>(),
      testing::twin_tolerance(size));
}

TEST(Contract, GradientsOfInputsLeaveNothingBehind) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    std::vector<at::Tensor> grads;
    const auto program = [&](Lab& model, const Twin& t, int) {
      const at::Tensor x = t.input(t.rank).requires_grad_(true);
      const at::Tensor loss = model(x).square().mean();
      grads.push_back(torch::autograd::grad({loss}, {x})[0]);
    };
    twin.run_sharded(program);
    program(twin.plain, twin, 0);
    expect_near(grads[0], grads[1]);
    for (const ParamGroup* group : twin.runtime->groups()) {
      EXPECT_FALSE(group->gradients().reduced().exists());
      EXPECT_FALSE(group->gradients().has_unreduced());
    }
    twin.expect_rest();
    twin.step(forward_backward);
  });
}

TEST(Contract, GradientsOfChosenParameters) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    // grad() returns this rank's own unsharded gradient.
    std::vector<std::vector<at::Tensor>> grads;
    const auto ask = [&](Lab& model, const Twin& t, int) {
      const at::Tensor loss = model(t.input(t.rank)).square().mean();
      grads.push_back(torch::autograd::grad(
          {loss},
          {model->cells[1]->gain, model->cells[2]->up->weight()}));
    };
    twin.run_sharded(ask);
    ask(twin.plain, twin, 0);
    for (std::size_t i = 0; i < 2; ++i) {
      expect_near(grads[0][i], grads[1][i]);
    }
    twin.expect_rest();
    twin.runtime->zero_grad();
    // backward(inputs) accumulates only into the chosen parameters.
    twin.step([](Lab& model, const Twin& t, int rank) {
      t.loss(model(t.input(rank)))
          .backward(
              {},
              std::nullopt,
              false,
              std::vector<at::Tensor>{
                  model->cells[1]->gain,
                  model->cells[2]->up->weight()});
    });
    twin.step(forward_backward);
  });
}

// All-reduces only when that many reduce-scatters have been launched.
class WaitingCommunicator : public ForwardingCommunicator {
 public:
  WaitingCommunicator(
      std::shared_ptr<Communicator> group,
      std::shared_ptr<CollectiveLog> log,
      std::int64_t num_scatters)
      : ForwardingCommunicator(std::move(group), "waiting"),
        log_(std::move(log)),
        num_scatters_(num_scatters) {}

  bool waited_in_vain = false;

 protected:
  void do_all_reduce(at::Tensor inout, ReduceOp op) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (num_launched() < num_scatters_) {
      if (std::chrono::steady_clock::now() > end) {
        waited_in_vain = true;
        break;
      }
      std::this_thread::yield();
    }
    ForwardingCommunicator::do_all_reduce(std::move(inout), op);
  }

 private:
  std::int64_t num_launched() const {
    const auto records = log_->records();
    return std::count_if(records.begin(), records.end(), [](const auto& r) {
      return r.kind == CollectiveKind::reduce_scatter;
    });
  }

  std::shared_ptr<CollectiveLog> log_;
  std::int64_t num_scatters_;
};

// The network between hosts may be slow: the ranks of a host reduce the next
// unit meanwhile.
TEST(Contract, ASlowOuterAxisHoldsBackNoInnerReduction) {
  for (const char* strategy : {"hsdp", "hsdp_zero2"}) {
    testing::run_ranks(4, [&](testing::RankContext& context) {
      context.log = std::make_shared<CollectiveLog>();
      auto mesh = context.mesh({{"outer", 2}, {"dp", 2}});
      testing::Lab lab;
      const auto units = static_cast<std::int64_t>(lab->units().size());
      const auto waiting = std::make_shared<WaitingCommunicator>(
          mesh->communicator(0, Purpose::reduce).shared_from_this(),
          context.log,
          units);
      mesh = mesh->with_communicators({{{"outer"}, waiting, Purpose::reduce}});
      const auto runtime = fully_shard(
          *lab,
          mesh,
          {.units = lab->units(),
           .strategy = strategy,
           .group = {.precision = Precision::full()}});
      context.log->clear();
      lab(at::ones({4, lab->cells[0]->gain.size(0)}))
          .square()
          .mean()
          .backward();
      runtime->synchronize();
      EXPECT_FALSE(waiting->waited_in_vain) << strategy;
    });
  }
}

}  // namespace
}  // namespace flatshard
