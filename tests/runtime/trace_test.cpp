// The runtime's actions, seen through its trace: a recompute all-gathers once,
// the trace replays in a fresh Scheduler, the collectives launched match the
// scheduler, addresses repeat.
#include "tests/runtime/twin.h"

#include "flatshard/nn/recompute.h"
#include "flatshard/schedule/simulate.h"

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

std::int64_t count_gathers(const Runtime& runtime, UnitId unit, Phase phase) {
  const auto actions = runtime.trace().actions;
  return std::ranges::count(
      actions,
      Action{.kind = ActionKind::gather, .unit = unit, .phase = phase});
}

// checkpoint inside each cell, with a trainable parameter outside it.
void checkpoint_inside(LabImpl& lab) {
  for (auto& cell : lab.cells) {
    cell->body = [](CellImpl& c, at::Tensor x) {
      return x + nn::checkpoint(
                     c,
                     [&c](const at::Tensor& in) {
                       return at::tanh(c.up(c.up(in)));
                     },
                     x) *
                     c.gain;
    };
  }
}

// checkpoint around pairs of cells and a parameter of the root.
void checkpoint_around(LabImpl& lab) {
  lab.body = [](LabImpl& l, at::Tensor x) {
    for (const int i : {0, 2}) {
      x = nn::checkpoint(
          l,
          [&l, i](const at::Tensor& in) {
            return l.cells[i + 1](l.cells[i](in)) * l.scale;
          },
          x);
    }
    return x * l.scale;
  };
}

// checkpoint around each cell, as models do.
void checkpoint_each(LabImpl& lab) {
  lab.body = [](LabImpl& l, at::Tensor x) {
    for (auto& cell : l.cells) {
      x = nn::checkpoint(
          *cell,
          [&cell](const at::Tensor& in) { return cell(in); },
          x);
    }
    return x * l.scale;
  };
}

TEST(Trace, B48_RecomputeGathersOnce) {
  for (const auto& configure :
       {checkpoint_inside, checkpoint_around, checkpoint_each}) {
    for_strategies([&](const RankContext& context, FullyShardOptions options) {
      Twin twin(context, configure, options);
      for (int step = 0; step < 4; ++step) {
        twin.runtime->clear_trace();
        twin.step(forward_backward);
        for (const auto& unit : twin.runtime->units()) {
          SCOPED_TRACE(unit->name());
          const bool shards = options.strategy == "zero3" ||
                              !options.strategy.starts_with("zero");
          EXPECT_LE(
              count_gathers(*twin.runtime, unit->id(), Phase::backward),
              shards ? 1 : 0);
          EXPECT_LE(
              count_gathers(*twin.runtime, unit->id(), Phase::forward),
              1);
        }
      }
    });
  }
}

// Everything odd that a program may do, in one step.
void odd_program(Lab& model, const Twin& twin, int rank) {
  const at::Tensor a = model(twin.input(rank, 0));
  {
    const at::NoGradGuard no_grad;
    model(twin.input(rank, 1));
  }
  const at::Tensor b = model(twin.input(rank, 2));
  twin.backward(a);
  twin.backward(b);
  const at::Tensor x = twin.input(rank, 3).requires_grad_(true);
  torch::autograd::grad({twin.loss(model(x))}, {x});
}

TEST(Trace, ReplaysInAFreshScheduler) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    twin.step(odd_program);
    twin.runtime->set_is_last_microbatch(false);
    twin.run_sharded(forward_backward);
    twin.runtime->set_is_last_microbatch(true);
    twin.run_sharded(forward_backward);
    twin.runtime->reset();
    for (auto* model : {&twin.sharded, &twin.plain}) {
      checkpoint_each(**model);
    }
    twin.step(forward_backward);
    const RuntimeTrace trace = twin.runtime->trace();
    const Scheduler& live = twin.runtime->scheduler();
    Scheduler fresh(live.units(), live.options());
    const std::vector<Action> again = replay(fresh, trace.events);
    EXPECT_EQ(to_string(again), to_string(trace.actions));
    EXPECT_TRUE(again == trace.actions);
  });
}

TEST(Trace, LaunchedCollectivesAreTheActions) {
  using Launch = std::tuple<CollectiveKind, std::int64_t, at::ScalarType>;
  using Launches = std::map<std::string, std::vector<Launch>>;
  for (const int world : {2, 3}) {
    std::mutex mutex;
    std::vector<Launches> of_ranks;
    run_ranks(world, [&](const RankContext& context) {
      Twin twin(context, [](LabImpl& lab) {
        lab.cells[1]->gain.set_requires_grad(false);  // two groups
      });
      twin.step(forward_backward);
      twin.step(odd_program);
      twin.step(forward_backward);
      twin.runtime->synchronize();
      std::vector<Launch> gathers;
      std::vector<Launch> reduces;
      for (const Action& action : twin.runtime->trace().actions) {
        if (action.unit == kNoUnit) {
          continue;
        }
        for (const auto& group : twin.runtime->units()[action.unit]->groups()) {
          const std::int64_t numel = group->layout().numel();
          if (action.kind == ActionKind::gather) {
            gathers.emplace_back(CollectiveKind::all_gather, numel, at::kFloat);
          } else if (action.kind == ActionKind::reduce && group->trainable()) {
            reduces.emplace_back(
                CollectiveKind::reduce_scatter,
                numel,
                at::kFloat);
          }
        }
      }
      Launches launches;
      for (const CollectiveRecord& record : context.log->records()) {
        launches[record.communicator].emplace_back(
            record.kind,
            record.numel,
            record.dtype);
      }
      std::vector<std::vector<Launch>> lists;
      for (const auto& [name, list] : launches) {
        lists.push_back(list);
      }
      EXPECT_FALSE(gathers.empty());
      EXPECT_FALSE(reduces.empty());
      EXPECT_EQ(lists.size(), 2);
      EXPECT_EQ(std::ranges::count(lists, gathers), 1);
      EXPECT_EQ(std::ranges::count(lists, reduces), 1);
      const std::lock_guard lock(mutex);
      of_ranks.push_back(std::move(launches));
    });
    for (const Launches& launches : of_ranks) {
      EXPECT_TRUE(launches == of_ranks.front());
    }
  }
}

using Addresses = std::map<std::string, std::vector<const void*>>;

// Adds where each parameter of a cell is while its forward runs.
void watch_addresses(LabImpl& lab, Addresses& seen) {
  for (std::size_t i = 0; i < lab.cells.size(); ++i) {
    lab.cells[i]->body = [i, &seen](CellImpl& c, at::Tensor x) {
      for (const auto& p : c.named_parameters()) {
        seen[fmt::format("cell{}.{}", i, p.key())].push_back(
            p.value().data_ptr());
      }
      return c.standard(x);
    };
  }
}

// Returns where the slots of each unit lay last, by role.
std::vector<const void*> last_slots(const Runtime& runtime) {
  std::vector<const void*> addresses;
  for (const auto& unit : runtime.units()) {
    for (const SlotRole role :
         {SlotRole::forward_weights,
          SlotRole::backward_weights,
          SlotRole::gradients}) {
      addresses.push_back(
          runtime.executor().slots().last(unit->id(), role).data);
    }
  }
  return addresses;
}

TEST(Trace, B66_AddressesRepeatFromTheThirdStepOn) {
  const auto two_forwards = [](Lab& model, const Twin& twin, int rank) {
    const at::Tensor a = model(twin.input(rank, 0));
    const at::Tensor b = model(twin.input(rank, 1));
    (twin.loss(a) + twin.loss(b)).backward();
  };
  const std::vector<std::pair<Twin::Program, void (*)(LabImpl&)>> cases = {
      {forward_backward, nullptr},
      {two_forwards, nullptr},
      {odd_program, nullptr},
      {forward_backward, checkpoint_around}};
  for (const auto& [program, configure] : cases) {
    for_strategies([&](const RankContext& context, FullyShardOptions options) {
      Twin twin(
          context,
          configure == nullptr ? std::function<void(LabImpl&)>{} : configure,
          options);
      Addresses seen;
      watch_addresses(*twin.sharded, seen);
      Addresses expected;
      std::vector<const void*> slots;
      std::int64_t num_dynamic = 0;
      std::int64_t arena = 0;
      for (int step = 1; step <= 6; ++step) {
        seen.clear();
        twin.step(program);
        if (step == 3) {
          expected = seen;
          slots = last_slots(*twin.runtime);
          num_dynamic = twin.runtime->executor().slots().pool().num_dynamic();
          arena = twin.runtime->executor().slots().pool().arena_nbytes();
        } else if (step > 3) {
          EXPECT_EQ(seen, expected) << "step " << step;
          EXPECT_EQ(last_slots(*twin.runtime), slots) << "step " << step;
          EXPECT_EQ(
              twin.runtime->executor().slots().pool().num_dynamic(),
              num_dynamic);
          EXPECT_EQ(
              twin.runtime->executor().slots().pool().arena_nbytes(),
              arena);
        }
      }
    });
  }
}

TEST(Trace, PrefetchForwardGathersWhatTheForwardBeginsWith) {
  for (const int prefetch : {0, 1, 3}) {
    for_strategies([&](const RankContext& context, FullyShardOptions options) {
      options.runtime.prefetch = prefetch;
      Twin twin(context, {}, options);
      Runtime& runtime = *twin.runtime;
      runtime.gathers()
          .prefetch_forward();  // there was no forward yet: nothing to learn
      EXPECT_TRUE(runtime.trace().actions.empty());
      std::int64_t num_dynamic = 0;
      std::int64_t peak = 0;
      for (int step = 0; step < 5; ++step) {
        twin.step(forward_backward);
        if (step == 2) {
          num_dynamic = runtime.executor().slots().pool().num_dynamic();
          peak = runtime.executor().slots().pool().peak_held_nbytes();
        }
        std::vector<UnitId> used;
        for (const Action& action : runtime.trace().actions) {
          if (action.kind == ActionKind::gather &&
              action.phase == Phase::forward) {
            used.push_back(action.unit);
          }
        }
        runtime.clear_trace();
        runtime.gathers().prefetch_forward();
        std::vector<UnitId> ahead;
        for (const Action& action : runtime.trace().actions) {
          if (action.kind == ActionKind::gather) {
            ahead.push_back(action.unit);
          }
        }
        used.resize(std::min(used.size(), ahead.size()));
        EXPECT_EQ(ahead, used);
        const bool gathers = !runtime.units().back()->resident();
        EXPECT_GE(ahead.size(), gathers ? prefetch + 1 : 0);
      }
      twin.step(forward_backward);
      for (const auto& unit : runtime.units()) {
        EXPECT_LE(count_gathers(runtime, unit->id(), Phase::forward), 1)
            << unit->name();
      }
      EXPECT_EQ(runtime.executor().slots().pool().num_dynamic(), num_dynamic);
      EXPECT_EQ(runtime.executor().slots().pool().peak_held_nbytes(), peak);
    });
  }
}

}  // namespace
}  // namespace flatshard
