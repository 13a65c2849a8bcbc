// DebugOptions: poisoned slots, strict life cycles. poison_process_test.cpp has
// the cases that end the process.
#include "tests/runtime/twin.h"

#include "flatshard/core/error.h"
#include "flatshard/diagnostics/poison.h"
#include "flatshard/diagnostics/strict_checks.h"
#include "flatshard/nn/recompute.h"

#include <ATen/ATen.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace flatshard {
namespace {

using ::testing::AllOf;
using testing::CellImpl;
using testing::for_strategies;
using testing::forward_backward;
using ::testing::HasSubstr;
using testing::Lab;
using testing::LabImpl;
using testing::RankContext;
using testing::run_ranks;
using testing::Twin;

constexpr DebugOptions kAll{.poison = true, .strict = true};

// Returns the message of the Error{usage} that `action` throws.
std::string usage_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

// Returns another, non-owning tensor over the same memory.
at::Tensor floats_at(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), at::kFloat);
}

bool all_nan(const at::Tensor& tensor) {
  return tensor.isnan().all().item<bool>();
}

FullyShardOptions strict_zero3() {
  return {.strategy = "zero3", .runtime = {.debug = {.strict = true}}};
}

TEST(Poison, FillIsNanInEveryType) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor t = at::zeros({5}, type);
    fill_with_nan(
        {.data = t.data_ptr(),
         .nbytes = static_cast<std::int64_t>(t.nbytes())});
    EXPECT_TRUE(all_nan(t)) << type;
  }
}

TEST(Debug, TrainingIsTheSameWithEverythingOn) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    options.runtime.debug = kAll;
    Twin twin(context, {}, options);
    for (int i = 0; i < 3; ++i) {
      twin.runtime->set_step(i + 1);
      twin.step(forward_backward);
      twin.runtime->finish_step();
    }
    {
      const at::NoGradGuard no_grad;  // an evaluation between two steps
      twin.sharded(twin.input(twin.rank));
    }
    twin.step(forward_backward);
    twin.runtime->finish_step();
  });
}

TEST(Debug, RecomputeAndRecoveryAreLegalWhenStrict) {
  const auto configure = [](LabImpl& lab) {
    lab.body = [](LabImpl& l, at::Tensor x) {
      if (l.fail) {
        throw std::runtime_error("lost in forward");
      }
      return nn::checkpoint(
                 l,
                 [&l](const at::Tensor& in) { return l.chain(in); },
                 x) *
             l.scale;
    };
    CellImpl& cell = *lab.cells[1];
    cell.body = [](CellImpl& c, at::Tensor x) {
      return nn::checkpoint(
          c,
          [&c](const at::Tensor& in) { return c.standard(in); },
          x);
    };
  };
  for_strategies([&](const RankContext& context, FullyShardOptions options) {
    options.runtime.debug = kAll;
    Twin twin(context, configure, options);
    twin.step(forward_backward);
    twin.runtime->finish_step();
    twin.sharded->fail = true;
    EXPECT_THROW(twin.run_sharded(forward_backward), std::runtime_error);
    twin.sharded->fail = false;
    twin.runtime->reset();
    twin.step(forward_backward);
    twin.runtime->finish_step();
  });
}

TEST(Poison, AnAliasOfAReleasedSlotReadsNan) {
  run_ranks(2, [](RankContext& context) {
    at::Tensor weight;    // the gathered weight of cell 0
    at::Tensor gradient;  // its place in the gradient slot
    nn::WgradSink* sink = nullptr;
    const auto configure = [&](LabImpl& lab) {
      lab.cells[0]->body = [&](CellImpl& cell, at::Tensor x) {
        if (cell.up->weight().data_ptr() != nullptr && sink != nullptr) {
          weight = floats_at(cell.up->weight());
          EXPECT_FALSE(weight.isnan().any().item<bool>());
        }
        at::Tensor y = cell.standard(x);
        y.register_hook(std::function<void(at::Tensor)>([&](const at::Tensor&) {
          if (sink != nullptr) {
            const auto target = sink->begin_wgrad(cell.up->weight());
            gradient = floats_at(target->grad);
          }
        }));
        return y;
      };
    };
    FullyShardOptions options{.strategy = "zero3"};
    options.runtime.prefetch = 0;
    options.runtime.debug.poison = true;
    Twin twin(context, configure, options);
    // Only the sharded model: `plain` runs the same body.
    sink = twin.runtime.get();
    const at::Tensor first = twin.sharded->cells[0](twin.input(context.rank));
    EXPECT_TRUE(first.isfinite().all().item<bool>());
    // Kept for its backward, as the outermost forward ended with it.
    twin.runtime->reset();
    EXPECT_TRUE(all_nan(weight));
    twin.run_sharded(forward_backward);
    twin.runtime->synchronize();
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(all_nan(gradient));
    EXPECT_TRUE(all_nan(weight));
    sink = nullptr;
  });
}

TEST(Strict, ASubmoduleCalledWithoutItsUnit) {
  run_ranks(2, [](RankContext& context) {
    Twin twin(context, {}, strict_zero3());
    twin.step(forward_backward);
    const std::string error =
        usage_error([&] { twin.sharded->cells[2]->up(twin.input(0)); });
    EXPECT_THAT(
        error,
        AllOf(
            HasSubstr("module cell2.up was called"),
            HasSubstr("unit cell2"),
            HasSubstr("call the unit through its holder")));
    // The same through `->forward`. That runs no hooks of the cell.
    twin.sharded->body = [](LabImpl& lab, at::Tensor x) {
      return lab.cells[1]->forward(lab.cells[0](x));
    };
    EXPECT_THAT(
        usage_error([&] { twin.run_sharded(forward_backward); }),
        HasSubstr("module cell1.up was called"));
    twin.sharded->body = [](LabImpl& lab, at::Tensor x) {
      return lab.standard(x);
    };
    twin.step(forward_backward);
    twin.runtime->finish_step();
  });
}

// Weights that the program unsharded exist without any hook, so this is silent
// otherwise.
TEST(Strict, AForwardWithoutHooksThatStillGetsAGradient) {
  run_ranks(2, [](RankContext& context) {
    FullyShardOptions options = strict_zero3();
    options.strategy = "zero1";
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    for (auto& cell : twin.sharded->cells) {
      cell->body = [](CellImpl& c, at::Tensor x) { return x * c.gain; };
    }
    twin.sharded->body = [](LabImpl& lab, at::Tensor x) {
      return lab.cells[1]->forward(lab.cells[0](x));
    };
    twin.runtime->gathers().unshard(2);
    EXPECT_THAT(
        usage_error([&] { twin.run_sharded(forward_backward); }),
        AllOf(
            HasSubstr("parameter cell1.gain got a gradient"),
            HasSubstr("its unit cell1"),
            HasSubstr("through its holder")));
  });
}

TEST(Strict, AForwardThatWaitsForItsBackward) {
  run_ranks(2, [](RankContext& context) {
    Twin twin(context, {}, strict_zero3());
    twin.step(forward_backward);
    twin.runtime->finish_step();
    twin.run_sharded(forward_backward);
    twin.sharded(twin.input(context.rank, 1));  // an evaluation with gradients
    twin.sgd->step(0.0);
    twin.sgd->zero_grad();
    const std::string at_end =
        usage_error([&] { twin.runtime->finish_step(); });
    EXPECT_THAT(
        at_end,
        AllOf(
            HasSubstr("module root required a backward"),
            HasSubstr("NoGradGuard")));
    // Programs that do not call finish_step hear it at the next forward.
    twin.run_sharded(forward_backward);
    twin.sharded(twin.input(context.rank, 1));
    twin.sgd->step(0.0);
    twin.sgd->zero_grad();
    EXPECT_THAT(
        usage_error([&] { twin.run_sharded(forward_backward); }),
        HasSubstr("required a backward"));
    twin.run_sharded(forward_backward);
  });
}

TEST(Strict, RanksInDifferentOrders) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    options.runtime.debug.strict = true;
    Twin twin(context, {}, options);
    twin.step(forward_backward);
    twin.runtime->finish_step();
    if (context.world == 1) {
      return;
    }
    twin.runtime->set_step(7);
    twin.sharded->body = [&](LabImpl& lab, at::Tensor x) {
      x = lab.cells[0](x);
      const int first = context.rank == 0 ? 1 : 2;
      return lab.cells[3](lab.cells[3 - first](lab.cells[first](x)));
    };
    EXPECT_THAT(
        usage_error([&] { twin.run_sharded(forward_backward); }),
        AllOf(
            HasSubstr("in step 7"),
            HasSubstr("rank 0 called module cell1, rank 1 called module "
                      "cell2")));
    // Said before anything went out: all can continue.
    twin.sharded->body = [](LabImpl& lab, at::Tensor x) {
      return lab.standard(x);
    };
    twin.step(forward_backward);
    twin.runtime->finish_step();
  });
}

TEST(Strict, ARankThatStopsEarly) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh();
    const std::vector<std::string> names{"a", "b", "c"};
    compare_next(*mesh, 2, names, 1);
    compare_next(*mesh, kNoUnit, names, 1);
    EXPECT_THAT(
        usage_error([&] {
          compare_next(*mesh, context.rank == 0 ? kNoUnit : 1, names, 3);
        }),
        HasSubstr("in step 3: rank 0 ended the step, rank 1 called module b"));
  });
}

// A plain torch module has no hooks.
struct ScaleImpl : torch::nn::Module {
  ScaleImpl() : gain(register_parameter("gain", at::ones({4}))) {}
  at::Tensor gain;
};

class PlainImpl : public nn::Module {
 public:
  PlainImpl()
      : scale(register_module("scale", std::make_shared<ScaleImpl>())) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale->gain; }
  std::shared_ptr<ScaleImpl> scale;
};
FLATSHARD_MODULE(Plain);

TEST(Strict, AModuleWithoutHooksIsNamed) {
  const auto mesh = Mesh::single(at::kCPU);
  FullyShardOptions options{.group = {.precision = Precision::full()}};
  Plain allowed;
  const auto runtime = fully_shard(*allowed, mesh, options);
  options.runtime.debug.strict = true;
  Plain refused;
  EXPECT_THAT(
      usage_error([&] { (void)fully_shard(*refused, mesh, options); }),
      AllOf(
          HasSubstr("module scale owns parameter scale.gain of unit root"),
          HasSubstr("flatshard::nn::Module")));
}

TEST(Debug, FinishStepIsFreeWithoutStrict) {
  run_ranks(2, [](RankContext& context) {
    Twin twin(context, {}, {.strategy = "zero3"});
    context.log->clear();
    twin.runtime->finish_step();
    EXPECT_TRUE(context.log->records().empty());
  });
}

}  // namespace
}  // namespace flatshard
