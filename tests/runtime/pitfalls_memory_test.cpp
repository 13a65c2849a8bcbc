// Mistakes that sharded runtimes are known to have made
// (docs/dev/regressions.md): what is allocated, kept, freed and read.
#include "tests/runtime/twin.h"
#include "tests/support/message_of.h"

#include "flatshard/nn/recompute.h"

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace flatshard {
namespace {

using testing::CellImpl;
using testing::check;
using testing::for_strategies;
using testing::forward_backward;
using ::testing::HasSubstr;
using testing::Lab;
using testing::LabImpl;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;
using testing::Twin;

// Counts bytes of CPU tensors that this thread made and that still exist.
class Meter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(
      void*,
      std::int64_t size,
      std::size_t,
      std::size_t,
      c10::Device) override {
    now += size;
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t now = 0;
  std::int64_t most = 0;
};

class WideImpl : public nn::Module {
 public:
  WideImpl() {
    for (int i = 0; i < 8; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), nn::Linear(256, 256)));
    }
  }
  std::vector<nn::Linear> layers;
};
FLATSHARD_MODULE(Wide);
constexpr std::int64_t kWideUnitBytes = 256 * 256 * 4;

TEST(Pitfalls, B52_WrappingAModelWithMemoryDoesNotHoldItTwice) {
  run_ranks(2, [](const RankContext& context) {
    const auto mesh = context.mesh();
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    Wide wide;
    FullyShardOptions options{.group = {.precision = Precision::full()}};
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> originals;
    for (auto& layer : wide->layers) {
      options.units.push_back(layer.get());
      nn::set_parameter_data(layer->weight(), at::ones({256, 256}));
      originals.push_back(layer->weight().storage().getWeakStorageImpl());
    }
    const std::int64_t before = meter->now;
    EXPECT_GE(before, 8 * kWideUnitBytes);
    meter->most = before;
    const auto runtime = fully_shard(*wide, mesh, options);
    for (const auto& original : originals) {
      EXPECT_TRUE(original.expired());
    }
    // Each unit's half, before its weights go; at the end the arena.
    EXPECT_LT(meter->most - before, kWideUnitBytes);
  });
}

TEST(Pitfalls, B12_ResidentWeightsAreNeverReleased) {
  for (const char* strategy : {"zero0", "zero1", "zero2"}) {
    run_ranks(2, [&](const RankContext& context) {
      Twin twin(context, {}, {.strategy = strategy});
      std::map<std::string, const void*> addresses;
      for (int step = 0; step < 3; ++step) {
        for (const auto& unit : twin.runtime->units()) {
          twin.runtime->gathers().unshard(unit->id());
        }
        for (const auto& p : nn::named_parameters(*twin.sharded)) {
          const void*& address = addresses[p.name];
          EXPECT_TRUE(address == nullptr || address == p.tensor.data_ptr());
          address = p.tensor.data_ptr();
          EXPECT_NE(address, nullptr) << p.name;
        }
        twin.step(forward_backward);
      }
      for (const Action& action : twin.runtime->trace().actions) {
        EXPECT_NE(action.kind, ActionKind::release);
      }
    });
  }
}

TEST(Pitfalls, B20_AllMemoryRestsAfterARecomputedStep) {
  const auto configure = [](LabImpl& lab) {
    lab.body = [](LabImpl& l, at::Tensor x) {
      for (const int i : {0, 2}) {
        x = nn::checkpoint(
            l,
            [&l, i](const at::Tensor& in) {
              return l.cells[i + 1](l.cells[i](in));
            },
            x);
      }
      return x * l.scale;
    };
  };
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, configure, options);
    for (int step = 0; step < 3; ++step) {
      twin.step(forward_backward);
      for (const auto& unit : twin.runtime->units()) {
        const auto held = twin.runtime->executor().held_slots(*unit);
        EXPECT_FALSE(held.weights) << unit->name();
        EXPECT_FALSE(held.grads) << unit->name();
        for (const auto& p : unit->parameters()) {
          EXPECT_TRUE(ParameterStorage::owner_of(p.tensor)) << p.name;
        }
      }
    }
  });
}

TEST(Pitfalls, B51_GradientSlotsAreGivenBack) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    std::shared_ptr<Mesh> mesh;
    for (const bool on_demand : {false, true}) {
      options.runtime.slots_on_demand = on_demand;
      Twin twin(context, {}, options, mesh);
      mesh = twin.runtime->mesh();
      for (int step = 0; step < 3; ++step) {
        // Two forwards first: more slots than were planned.
        twin.step([](Lab& model, const Twin& t, int rank) {
          const at::Tensor a = model(t.input(rank, 0));
          const at::Tensor b = model(t.input(rank, 1));
          (t.loss(a) + t.loss(b)).backward();
        });
        EXPECT_EQ(twin.runtime->executor().slots().pool().num_held(), 0);
        EXPECT_EQ(twin.runtime->executor().slots().pool().dynamic_nbytes(), 0);
        for (const auto& unit : twin.runtime->units()) {
          EXPECT_FALSE(twin.runtime->executor().held_slots(*unit).grads);
        }
      }
    }
  });
}

TEST(Pitfalls, B51_SlotsOnDemandAreOfWeightsAloneUntilTheBackward) {
  run_ranks(2, [](const RankContext& context) {
    Twin planned(context);
    Twin twin(
        context,
        {},
        {.runtime = {.slots_on_demand = true}},
        planned.runtime->mesh());
    const SlotPool& pool = twin.runtime->executor().slots().pool();
    for (int step = 0; step < 3; ++step) {
      twin.step([&](Lab& model, const Twin& t, int rank) {
        const at::Tensor out = model(t.input(rank));
        if (model.get() == t.sharded.get()) {
          std::int64_t weights = 0;
          for (const auto& unit : t.runtime->units()) {
            const auto held = t.runtime->executor().held_slots(*unit);
            weights += held.weights.nbytes;
            EXPECT_FALSE(held.grads);
          }
          EXPECT_EQ(pool.dynamic_nbytes(), weights);
          EXPECT_LT(
              weights,
              planned.runtime->executor().slots().pool().arena_nbytes());
        }
        t.backward(out);
      });
      EXPECT_EQ(pool.arena_nbytes(), 0);
      EXPECT_EQ(pool.num_held(), 0);
    }
  });
}

// While one exists, at::empty hands out NaN instead of what lay there.
class PoisonedMemory {
 public:
  PoisonedMemory() {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
  }
  ~PoisonedMemory() {
    at::globalContext().setDeterministicAlgorithms(false, false);
  }
};

TEST(Pitfalls, B24_MemoryIsWrittenBeforeItIsRead) {
  const PoisonedMemory poison;
  ASSERT_TRUE(at::empty({1}).isnan().item<bool>());
  // `spare` gets no gradient. Two microbatches add up.
  check({}, [](Lab& model, const Twin& twin, int rank) {
    for (const bool last : {false, true}) {
      if (&model == &twin.sharded) {
        twin.runtime->set_is_last_microbatch(last);
      }
      twin.backward(model(twin.input(rank, last)));
    }
  });
}

TEST(Pitfalls, B57_ViewsFollowTheirParameter) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    at::Tensor view;
    // While a unit is resharded its parameters' storage refuses reads: each
    // all-gather points it at memory again, at whichever address that has.
    const auto rests = [&] {
      try {
        return view.sum().item<double>() != view.sum().item<double>();
      } catch (const c10::Error& e) {
        EXPECT_THAT(e.what(), HasSubstr("gain of "));
        EXPECT_THAT(e.what(), HasSubstr("is resharded"));
        return true;
      }
    };
    const bool is_released =
        context.world > 1 &&
        std::set<std::string>{"zero3", "hsdp", "hfsdp"}.contains(
            options.strategy);
    twin.sharded->cells[1]->body = [&](CellImpl& c, at::Tensor x) {
      if (!view.defined()) {
        view = c.gain.detach().view({3, 4});
      }
      EXPECT_FALSE(rests());
      EXPECT_EQ(view.data_ptr(), c.gain.data_ptr());
      EXPECT_TRUE(view.flatten().equal(c.gain));
      return c.standard(x);
    };
    twin.step(forward_backward);
    EXPECT_EQ(rests(), is_released);
    for (int step = 0; step < 3; ++step) {
      // Needs a larger arena from its second step on.
      twin.step([](Lab& model, const Twin& t, int rank) {
        const at::Tensor a = model(t.input(rank, 0));
        const at::Tensor b = model(t.input(rank, 1));
        (t.loss(a) + t.loss(b)).backward();
      });
      EXPECT_EQ(rests(), is_released);
    }
  });
}

TEST(Pitfalls, B63_TwoRuntimesShareNothing) {
  run_ranks(2, [](const RankContext& context) {
    Twin a(context, {}, {}, context.mesh({{"dp", 2}}, "a"));
    Twin b(context, {}, {}, context.mesh({{"dp", 2}}, "b"));
    for (int step = 0; step < 3; ++step) {
      a.step([&](Lab& model, const Twin& t, int rank) {
        const at::Tensor out = model(t.input(rank));
        if (&model == &t.sharded) {
          b.step(forward_backward);  // while a's last unit is gathered
        }
        t.backward(out);
      });
    }
  });
}

// -- reading resharded parameters --------------------------------------------

TEST(Pitfalls, R28_AReleasedParameterIsRefusedByName) {
  run_ranks(2, [](const RankContext& context) {
    Twin twin(context);
    const at::Tensor gain = twin.sharded->cells[1]->gain;
    const auto refused = [&](const std::string& why) {
      for (const auto& read : std::vector<std::function<void()>>{
               [&] { gain.clone(); },
               [&] { gain.to(at::kDouble); },
               [&] { gain.sum(); },
               [&] {
                 at::NoGradGuard guard;
                 gain.detach().fill_(1);
               },
               [&] { gain.data_ptr(); }}) {
        const std::string message = message_of(read);
        EXPECT_THAT(message, HasSubstr("cell1.gain"));
        EXPECT_THAT(message, HasSubstr(why));
      }
      EXPECT_EQ(gain.sizes(), at::IntArrayRef({12}));
      EXPECT_EQ(gain.scalar_type(), at::kFloat);
    };
    refused("is resharded");
    twin.step(forward_backward);
    refused("is resharded");
    twin.step(forward_backward);
    twin.sgd.reset();
    twin.runtime.reset();
    refused("no longer exists");
  });
}

// A child that is a separate unit is resharded while its parent computes.
TEST(Pitfalls, B18_AParentThatReadsAUnitsParameterIsToldSo) {
  run_ranks(2, [](const RankContext& context) {
    Twin twin(context);
    twin.step(forward_backward);
    const auto body = twin.sharded->body;
    twin.sharded->body = [](LabImpl& l, at::Tensor x) {
      return l.chain(x) * l.cells[1]->gain;
    };
    const std::string message =
        message_of([&] { twin.run_sharded(forward_backward); });
    EXPECT_THAT(message, HasSubstr("cell1.gain"));
    EXPECT_THAT(message, HasSubstr("share_parameter"));
    twin.sharded->body = body;
    twin.step(forward_backward);
    // If the parent registers it too, it belongs to the parent.
  });
  check(
      [](LabImpl& lab) {
        const at::Tensor gain =
            lab.share_parameter("peek", *lab.cells[1], "gain");
        lab.body = [gain](LabImpl& l, at::Tensor x) {
          return l.chain(x * gain) * gain;
        };
      },
      forward_backward);
}

}  // namespace
}  // namespace flatshard
