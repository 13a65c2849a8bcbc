// Known mistakes of sharded runtimes (docs/dev/regressions.md), as far as they
// show in a program's results or in the order of actions.
#include "tests/runtime/twin.h"

#include "flatshard/nn/recompute.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>

namespace flatshard {
namespace {

using testing::CellImpl;
using testing::check;
using testing::for_strategies;
using testing::forward_backward;
using testing::Lab;
using testing::LabImpl;
using testing::RankContext;
using testing::run_ranks;
using testing::Twin;

// n forwards and backwards; with `tell` the runtime hears which is the last.
Twin::Program microbatches(int n, bool tell) {
  return [n, tell](Lab& model, const Twin& twin, int rank) {
    for (int m = 0; m < n; ++m) {
      if (tell && &model == &twin.sharded) {
        twin.runtime->set_is_last_microbatch(m == n - 1);
      }
      twin.backward(model(twin.input(rank, m)));
    }
  };
}

std::int64_t count(const Twin& twin, ActionKind kind, UnitId unit) {
  const auto actions = twin.runtime->trace().actions;
  return std::ranges::count_if(actions, [&](const Action& action) {
    return action.kind == kind && action.unit == unit;
  });
}

// Returns the most units between `begin` and `end` actions at any time. The
// root does not count because it is open all the time.
int most_at_once(const Twin& twin, ActionKind begin, ActionKind end) {
  int now = 0;
  int most = 0;
  for (const Action& action : twin.runtime->trace().actions) {
    if (action.unit > 0) {
      now += action.kind == begin;
      now -= action.kind == end;
      most = std::max(most, now);
    }
  }
  return most;
}

TEST(Pitfalls, R1_UnusedParametersDoNotHoldTheirUnit) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);  // `spare` of each cell gets no gradient
    for (int step = 0; step < 3; ++step) {
      twin.runtime->clear_trace();
      twin.step(forward_backward);
      if (options.strategy == "zero3" &&
          options.runtime.reshard_after_forward) {
        EXPECT_LE(
            most_at_once(twin, ActionKind::gather, ActionKind::release),
            1 + options.runtime.prefetch);
      }
    }
  });
}

TEST(Pitfalls, R2_TheSecondOfTwoBackwardsReleasesItsUnits) {
  run_ranks(2, [](const RankContext& context) {
    Twin twin(context);
    for (int step = 0; step < 3; ++step) {
      twin.step([](Lab& model, const Twin& t, int rank) {
        const at::Tensor a = model(t.input(rank, 0));
        const at::Tensor b = model(t.input(rank, 1));
        t.backward(a);
        t.runtime->clear_trace();
        t.backward(b);
        if (&model == &t.sharded) {
          EXPECT_LE(
              most_at_once(t, ActionKind::gather, ActionKind::release),
              2);
          EXPECT_EQ(count(t, ActionKind::reduce, 1), 1);
        }
      });
    }
  });
}

TEST(Pitfalls, R3_AUnitCalledTwiceIsGatheredOncePerDirection) {
  const auto configure = [](LabImpl& lab) {
    lab.body = [](LabImpl& l, at::Tensor x) {
      return l.chain(l.cells[0](l.cells[0](x))) * l.scale;
    };
  };
  check(configure, forward_backward);
  run_ranks(2, [&](const RankContext& context) {
    Twin twin(
        context,
        configure,
        {.runtime = {.reshard_after_forward = false}});
    twin.step(forward_backward);
    twin.runtime->clear_trace();
    twin.step(forward_backward);
    EXPECT_EQ(count(twin, ActionKind::gather, 1), 1);
    EXPECT_EQ(count(twin, ActionKind::reduce, 1), 1);
  });
}

TEST(Pitfalls, R5_BackwardsWithoutMicrobatchMarksAddUp) {
  check({}, microbatches(3, /*tell=*/false));
}

TEST(Pitfalls, B11_ReplicatedGradientsAreReducedOnceAStep) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    const bool sharded =
        options.strategy != "zero0" && options.strategy != "zero1";
    for (int step = 0; step < 2; ++step) {
      twin.runtime->clear_trace();
      twin.step(microbatches(3, /*tell=*/true));
      for (UnitId unit = 0; unit < 5; ++unit) {
        EXPECT_EQ(count(twin, ActionKind::reduce, unit), sharded ? 3 : 1);
      }
    }
  });
}

TEST(Pitfalls, B42_EveryForwardSeesTheLastStep) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    const bool spreads =
        options.strategy == "zero1" || options.strategy == "zero2";
    for (int step = 0; step < 3; ++step) {
      twin.runtime->clear_trace();
      twin.step(microbatches(2, /*tell=*/true));  // compares with fresh weights
      if (spreads || options.strategy == "zero0") {
        for (UnitId unit = 0; unit < 5; ++unit) {
          EXPECT_EQ(count(twin, ActionKind::gather, unit), spreads ? 1 : 0);
        }
      }
    }
  });
}

TEST(Pitfalls, B10_FusedGradientsOverwriteFirstAndThenAdd) {
  // cells[1] writes the gradient of `up` into its slot twice in a microbatch.
  check(
      [](LabImpl& lab) {
        lab.cells[1]->body = [](CellImpl& c, at::Tensor x) {
          return x + c.up(at::tanh(c.up(x))) * c.gain;
        };
      },
      microbatches(2, /*tell=*/true));
}

TEST(Pitfalls, B6_ASlotIsFreeOnlyAfterItsReduction) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    options.runtime.streams.max_delay_us = 2000;
    Twin twin(context, {}, options);
    for (int step = 0; step < 3; ++step) {
      twin.step(forward_backward);
    }
  });
}

// Cells 0 and 1 run in two recomputed parts: both are reduced twice.
void two_parts(LabImpl& lab) {
  lab.body = [](LabImpl& l, at::Tensor x) {
    for (int part = 0; part < 2; ++part) {
      x = nn::checkpoint(
          l,
          [&l](const at::Tensor& in) { return l.cells[1](l.cells[0](in)); },
          x);
    }
    return l.cells[3](l.cells[2](x)) * l.scale;
  };
}

TEST(Pitfalls, B15_AGradientSlotIsNotWrittenWhileItIsReduced) {
  for (const bool frozen : {false, true}) {
    // With cell 0 frozen, cell 1 comes again right after its reduction.
    const auto configure = [frozen](LabImpl& lab) {
      two_parts(lab);
      for (auto& p : lab.cells[0]->parameters()) {
        p.set_requires_grad(!frozen);
      }
    };
    for_strategies([&](const RankContext& context, FullyShardOptions options) {
      options.runtime.streams.max_delay_us = 2000;
      Twin twin(context, configure, options);
      for (int step = 0; step < 3; ++step) {
        twin.runtime->clear_trace();
        twin.step(forward_backward);
        EXPECT_EQ(
            most_at_once(twin, ActionKind::acquire_grads, ActionKind::drain),
            2);
      }
    });
  }
}

TEST(Pitfalls, B14_UnitsCalledWithoutTheirRoot) {
  check({}, [](Lab& model, const Twin& twin, int rank) {
    twin.backward(model->cells[2](model->cells[1](twin.input(rank))));
  });
}

TEST(Pitfalls, B17_ABackwardInsideAForwardLeavesTheRootsWeights) {
  check(
      [](LabImpl& lab) {
        lab.body = [](LabImpl& l, at::Tensor x) {
          const at::Tensor in = x.detach().requires_grad_(true);
          const at::Tensor slope =
              torch::autograd::grad({l.cells[0](in).sum()}, {in})[0];
          return l.chain(x + slope) * l.scale;
        };
      },
      forward_backward);
}

TEST(Pitfalls, B21_FrozenUnitsAnywhere) {
  for (const auto& frozen :
       std::vector<std::vector<int>>{{0}, {3}, {0, 1, 2, 3}}) {
    check(
        [&](LabImpl& lab) {
          for (const int cell : frozen) {
            for (auto& p : lab.cells[cell]->parameters()) {
              p.set_requires_grad(false);
            }
          }
        },
        forward_backward);
  }
  run_ranks(2, [](const RankContext& context) {
    Twin twin(context, [](LabImpl& lab) {
      for (auto& p : lab.cells[0]->parameters()) {
        p.set_requires_grad(false);
      }
    });
    twin.step(forward_backward);
    EXPECT_EQ(count(twin, ActionKind::reduce, 1), 0);
    EXPECT_EQ(count(twin, ActionKind::reduce, 2), 1);
  });
}

TEST(Pitfalls, R25_TheAwaitCoversAllGroupsOfAUnit) {
  run_ranks(2, [](const RankContext& context) {
    FullyShardOptions options;
    options.runtime.streams.max_delay_us = 3000;
    Twin twin(
        context,
        [](LabImpl& lab) {
          for (auto& cell : lab.cells) {
            cell->gain.set_requires_grad(false);  // the second group
          }
        },
        options);
    for (int step = 0; step < 4; ++step) {
      twin.step(forward_backward);
    }
  });
}

// The root's gradient comes first, in the middle or last, and another cell on
// each rank gets gradients for all of its parameters.
void other_order_on_each_rank(Lab& model, const Twin& twin, int rank) {
  for (int i = 0; i < 4; ++i) {
    model->cells[i]->body = [uses = i == rank](CellImpl& c, at::Tensor x) {
      x = c.standard(x);
      return uses ? x * c.spare.mean() : x;
    };
  }
  model->body = [rank](LabImpl& l, at::Tensor x) {
    for (int i = 0; i < 4; ++i) {
      x = i == 2 * rank ? l.cells[i](x * l.scale) : l.cells[i](x);
    }
    return rank == 2 ? x * l.scale : x;
  };
  forward_backward(model, twin, rank);
}

TEST(Pitfalls, B25_ReductionsGoInOneOrderOnAllRanks) {
  for (const char* strategy : {"zero3", "zero1"}) {
    std::mutex mutex;
    std::vector<std::vector<UnitId>> orders;
    run_ranks(3, [&](const RankContext& context) {
      Twin twin(context, {}, {.strategy = strategy});
      for (int step = 0; step < 3; ++step) {
        twin.step(other_order_on_each_rank);
      }
      std::vector<UnitId> order;
      for (const Action& action : twin.runtime->trace().actions) {
        if (action.kind == ActionKind::reduce) {
          order.push_back(action.unit);
        }
      }
      const std::lock_guard lock(mutex);
      orders.push_back(order);
    });
    EXPECT_EQ(orders[0].size(), 15U) << strategy;
    EXPECT_EQ(orders[1], orders[0]) << strategy;
    EXPECT_EQ(orders[2], orders[0]) << strategy;
  }
}

TEST(Pitfalls, B49_UnitsThatOneMicrobatchSkips) {
  check({}, [](Lab& model, const Twin& twin, int rank) {
    const auto standard = model->body;
    const auto tell = [&](bool last) {
      if (&model == &twin.sharded) {
        twin.runtime->set_is_last_microbatch(last);
      }
    };
    tell(false);
    model->body = [](LabImpl& l, at::Tensor x) {
      return l.cells[3](l.cells[1](l.cells[0](x))) * l.scale;
    };
    twin.backward(model(twin.input(rank, 0)));
    // Runs all, but no gradient reaches cells 0 and 1.
    model->body = [](LabImpl& l, at::Tensor x) {
      x = l.cells[1](l.cells[0](x)).detach();
      return l.cells[3](l.cells[2](x)) * l.scale;
    };
    twin.backward(model(twin.input(rank, 1)));
    tell(true);
    model->body = standard;
    twin.backward(model(twin.input(rank, 2)));
  });
}

TEST(Pitfalls, B53_StepsStartWithoutGradients) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    for (int step = 0; step < 3; ++step) {
      for (const ParamGroup* group : twin.runtime->groups()) {
        EXPECT_FALSE(group->gradients().reduced().exists());
      }
      twin.step(forward_backward);
    }
  });
}

// Cell 2 runs only inside the backward, and has no backward itself.
TEST(Pitfalls, R9_AForwardInsideABackward) {
  check(
      [](LabImpl& lab) {
        lab.body = [](LabImpl& l, at::Tensor x) {
          x = l.cells[1](l.cells[0](x));
          if (x.requires_grad()) {
            x.register_hook(
                std::function<void(at::Tensor)>([&l](const at::Tensor&) {
                  const at::AutoGradMode grad_mode(true);
                  l.cells[2](at::ones({4, 12}));
                }));
          }
          return l.cells[3](x) * l.scale;
        };
      },
      forward_backward);
}

TEST(Pitfalls, B27_ARecomputedUnitIsNotReleasedBeforeItsBackward) {
  const auto configure = [](LabImpl& lab) {
    for (auto& cell : lab.cells) {
      cell->body = [](CellImpl& c, at::Tensor x) {
        return nn::checkpoint(
            c,
            [&c](const at::Tensor& in) { return c.standard(in); },
            x);
      };
    }
    lab.body = [](LabImpl& l, at::Tensor x) {
      for (auto& cell : l.cells) {
        x = nn::checkpoint(
            *cell,
            [&cell](const at::Tensor& in) { return cell(in); },
            x);
      }
      return x * l.scale;
    };
  };
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, configure, options);
    for (int step = 0; step < 3; ++step) {
      twin.runtime->clear_trace();
      twin.step(forward_backward);
      for (UnitId unit = 1; unit < 5; ++unit) {
        EXPECT_LE(count(twin, ActionKind::gather, unit), 2);
      }
      if (options.runtime.reshard_after_forward &&
          options.strategy == "zero3") {
        EXPECT_LE(
            most_at_once(twin, ActionKind::gather, ActionKind::release),
            1 + options.runtime.prefetch);
      }
    }
  });
}

}  // namespace
}  // namespace flatshard
