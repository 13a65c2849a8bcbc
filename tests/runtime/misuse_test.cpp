// Mistakes of users of the C++ API: each error names unit, parameter and what
// to do, on one rank as on several and with every strategy.
#include "tests/runtime/twin.h"
#include "tests/support/message_of.h"

#include "flatshard/core/error.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace flatshard {
namespace {

using ::testing::AllOf;
using testing::CellImpl;
using testing::forward_backward;
using ::testing::HasSubstr;
using testing::Lab;
using testing::LabImpl;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;
using testing::Twin;

// One rank with weights that are always unsharded, and two; weights that are
// stored sharded and weights that are stored unsharded.
void for_ranks(
    const std::function<void(const RankContext&, FullyShardOptions)>& test) {
  struct Case {
    int world;
    const char* strategy;
    bool reshard = true;
  };
  for (const Case& c :
       {Case{1, "zero3"},
        Case{1, "zero0"},
        Case{2, "zero3"},
        Case{2, "zero3", false},
        Case{2, "zero2"}}) {
    SCOPED_TRACE(fmt::format("{} on {}, {}", c.strategy, c.world, c.reshard));
    FullyShardOptions options{.strategy = c.strategy};
    options.runtime.reshard_after_forward = c.reshard;
    run_ranks(c.world, [&](RankContext& context) { test(context, options); });
  }
}

// The weights of a resharded unit were used.
auto names_resting(const std::string& unit) {
  return AllOf(
      HasSubstr("parameter " + unit + "."),
      HasSubstr("of unit " + unit + " "),
      HasSubstr("`block(x)`, not `block->forward(x)`"));
}

void call_directly(Twin& twin, std::size_t cell) {
  twin.sharded->body = [cell](LabImpl& lab, at::Tensor x) {
    for (std::size_t i = 0; i < lab.cells.size(); ++i) {
      x = i == cell ? lab.cells[i]->forward(x) : lab.cells[i](x);
    }
    return x * lab.scale;
  };
}

TEST(Misuse, AForwardWithoutItsHooks) {
  for_ranks([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    const auto body = twin.sharded->body;
    twin.step(forward_backward);
    for (const std::size_t cell : {0, 3}) {
      call_directly(twin, cell);
      EXPECT_THAT(
          message_of([&] { twin.run_sharded(forward_backward); }),
          names_resting("cell" + std::to_string(cell)));
      twin.sharded->body = body;
      twin.runtime->reset();
    }
    // In the full model its units run, while its own parameter is resharded.
    EXPECT_THAT(
        message_of([&] { twin.sharded->forward(twin.input(0)); }),
        HasSubstr("parameter scale of unit root "));
    twin.runtime->reset();
    twin.step(forward_backward);
  });
}

// After its own forward a unit is resharded, though its weights may be kept for
// the backward.
TEST(Misuse, ASubmoduleOfAUnitThatRests) {
  for_ranks([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    const auto body = twin.sharded->body;
    const at::Tensor x = twin.input(0);
    const auto refused = [&](std::size_t cell) {
      EXPECT_THAT(
          message_of([&] { twin.sharded->cells[cell]->up(x); }),
          names_resting("cell" + std::to_string(cell)));
    };
    refused(2);
    twin.sharded->body = [](LabImpl& lab, at::Tensor in) {
      return lab.cells[3]->up(lab.standard(in));
    };
    EXPECT_THAT(
        message_of([&] { twin.run_sharded(forward_backward); }),
        names_resting("cell3"));
    twin.sharded->body = body;
    twin.runtime->reset();
    twin.step(forward_backward);
    refused(0);
    const at::Tensor out = twin.sharded(twin.input(context.rank));
    refused(3);
    twin.backward(out);
    twin.sgd->zero_grad();
    {
      const at::NoGradGuard no_grad;
      twin.sharded(x);
      refused(3);
    }
    twin.step(forward_backward);
  });
}

TEST(Misuse, WeightsThatWereUnshardedByHandCanBeRead) {
  for_ranks([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    const at::Tensor gain = twin.sharded->cells[1]->gain;
    const UnitId unit = 2;
    ASSERT_EQ(twin.runtime->units()[unit]->name(), "cell1");
    EXPECT_THAT(message_of([&] { gain.sum(); }), names_resting("cell1"));
    twin.runtime->gathers().unshard(unit);
    EXPECT_TRUE(gain.equal(twin.plain->cells[1]->gain));
    twin.runtime->gathers().reshard(unit);
    EXPECT_THAT(message_of([&] { gain.sum(); }), names_resting("cell1"));
    twin.runtime->gathers().unshard(unit);
    twin.step(forward_backward);
    EXPECT_THAT(message_of([&] { gain.sum(); }), names_resting("cell1"));
  });
}

TEST(Misuse, ARuntimeThatIsGone) {
  for_ranks([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    const at::Tensor loss = twin.loss(twin.sharded(twin.input(context.rank)));
    twin.sgd.reset();
    twin.runtime.reset();
    const auto named = [](const std::string& parameter,
                          const std::string& unit) {
      return AllOf(
          HasSubstr("parameter " + parameter),
          HasSubstr("of unit " + unit + " "),
          HasSubstr("Runtime that fully_shard returned was destroyed"),
          HasSubstr("keep it"));
    };
    EXPECT_THAT(message_of([&] { loss.backward(); }), named("", "root"));
    EXPECT_THAT(
        message_of([&] { twin.sharded(twin.input(0)); }),
        named("cell0.up.", "cell0"));
  });
}

// Kernels would follow a null pointer.
TEST(Misuse, AViewThatABackwardReadsWhenTheRuntimeIsGone) {
  for (const int world : {1, 2}) {
    run_ranks(world, [](RankContext& context) {
      Twin twin(context, [](LabImpl& lab) {
        lab.cells[1]->body = [](CellImpl& c, at::Tensor x) {
          return at::matmul(x, c.up->weight().t());
        };
      });
      const at::Tensor x = twin.input(0).requires_grad_();
      const at::Tensor sum = twin.sharded->cells[1](x * 1).sum();
      twin.sgd.reset();
      twin.runtime.reset();
      EXPECT_THAT(
          message_of([&] { sum.backward(); }),
          HasSubstr("parameter cell1.up.weight of unit cell1 "));
    });
  }
}

TEST(Misuse, ASecondFullyShard) {
  for_ranks([](const RankContext& context, FullyShardOptions options) {
    const auto mesh = context.mesh({{"dp", context.world}}, "again");
    const auto again = [&](Lab& lab) {
      FullyShardOptions more{.group = {.precision = Precision::full()}};
      more.units = lab->units();
      return message_of([&] { (void)fully_shard(*lab, mesh, more); });
    };
    {
      Twin twin(context, {}, options);
      EXPECT_THAT(
          again(twin.sharded),
          AllOf(
              HasSubstr("parameter scale"),
              HasSubstr("unit root"),
              HasSubstr("once, for the outermost module"),
              HasSubstr("FullyShardOptions::units")));
      twin.step(forward_backward);  // the first one is as it was
      twin.sgd.reset();
      twin.runtime.reset();
      EXPECT_THAT(
          again(twin.sharded),
          AllOf(HasSubstr("parameter scale"), HasSubstr("was destroyed")));
    }
    // A unit first, as FSDP2 does it, then the root.
    Lab lab;
    options.group.precision = Precision::full();
    const auto runtime = fully_shard(*lab->cells[2], mesh, options);
    EXPECT_THAT(
        again(lab),
        AllOf(
            HasSubstr("parameter cell2.gain"),
            HasSubstr("FullyShardOptions::units")));
  });
}

TEST(Misuse, AForwardBeforeFullyShard) {
  Lab lab;
  const at::Tensor x = at::ones({4, 12});
  const auto named = [](const std::string& parameter) {
    return AllOf(
        HasSubstr("parameter " + parameter),
        HasSubstr("fully_shard"),
        HasSubstr("nn::materialize"));
  };
  EXPECT_THAT(message_of([&] { lab(x); }), named("scale"));
  EXPECT_THAT(message_of([&] { lab->forward(x); }), named("gain"));
  EXPECT_THAT(message_of([&] { lab->cells[1]->up(x); }), named("weight"));
  EXPECT_THAT(
      message_of([&] { lab->cells[1]->up->forward(x); }),
      named("weight"));
  // Only shapes may be computed.
  EXPECT_EQ(
      at::linear(x.to(at::kMeta), lab->cells[1]->up->weight()).sizes(),
      x.sizes());
  nn::materialize(*lab, at::kCPU, at::kFloat, nn::random_fill());
  EXPECT_EQ(lab(x).sizes(), x.sizes());
}

TEST(Misuse, AnotherDtypeThanTheWeights) {
  for_ranks([](const RankContext& context, FullyShardOptions options) {
    Lab lab;
    options.units = lab->units();  // the default precision: bfloat16
    const auto runtime = fully_shard(*lab, context.mesh(), options);
    const at::Tensor x = at::ones({4, 12});
    const auto named = [](const std::string& parameter) {
      return AllOf(
          HasSubstr("unit cell1"),
          HasSubstr("parameter " + parameter),
          HasSubstr("BFloat16"),
          HasSubstr("Float"),
          HasSubstr("Precision"),
          HasSubstr("x.to(at::kBFloat16)"));
    };
    EXPECT_THAT(
        message_of([&] { lab->cells[1](x); }),
        named("cell1.up.weight"));
    lab->cells[1]->body = [](CellImpl& c, at::Tensor in) {
      return at::matmul(in, c.up->weight());  // torch's own check
    };
    EXPECT_THAT(message_of([&] { lab->cells[1](x); }), named("cell1."));
    lab->cells[1]->body = [](CellImpl& c, at::Tensor in) {
      return c.standard(in);
    };
    EXPECT_EQ(lab(x.to(at::kBFloat16)).sizes(), x.sizes());
  });
}

// Layers that delay weight gradients do this.
TEST(Misuse, AWeightGradientAfterItsBackward) {
  for (const int world : {1, 2}) {
    run_ranks(world, [](const RankContext& context) {
      Twin twin(context);
      twin.step(forward_backward);
      twin.run_sharded(forward_backward);
      const auto named = [](const char* parameter) {
        return AllOf(
            HasSubstr(std::string("parameter ") + parameter),
            HasSubstr("of unit cell1 "),
            HasSubstr("outside a backward"));
      };
      CellImpl& cell = *twin.sharded->cells[1];
      EXPECT_THAT(
          message_of([&] {
            nn::WgradSink& sink = *twin.runtime;
            sink.begin_wgrad(cell.up->weight());
          }),
          named("cell1.up.weight"));
      cell.gain.mutable_grad() = at::ones_like(twin.plain->cells[1]->gain);
      EXPECT_THAT(
          message_of([&] { twin.run_sharded(forward_backward); }),
          named("cell1.gain"));
      twin.runtime->reset();
      twin.step(forward_backward);
    });
  }
}

}  // namespace
}  // namespace flatshard
