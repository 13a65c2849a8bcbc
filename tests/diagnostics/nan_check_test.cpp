#include "flatshard/diagnostics/nan_check.h"

#include "flatshard/core/error.h"
#include "flatshard/fully_shard/fully_shard.h"
#include "flatshard/nn/linear.h"
#include "tests/runtime/twin.h"

#include <ATen/ATen.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace flatshard::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

std::string usage_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

// Changes element `index` of the gradient of `parameter` on its way.
void spoil(const at::Tensor& parameter, std::int64_t index, double value) {
  parameter.register_hook(
      std::function<at::Tensor(at::Tensor)>([=](const at::Tensor& grad) {
        at::Tensor spoilt = grad.clone();
        spoilt[index] = value;
        return spoilt;
      }));
}

TEST(NanCheck, ALocalGradientNamesItsRankBeforeTheReduction) {
  for (const char* strategy : {"zero3", "zero2", "zero1", "zero0"}) {
    SCOPED_TRACE(strategy);
    // The other rank waits in vain, and fails when this one's groups go.
    const std::string error = usage_error([&] {
      run_ranks(2, [&](RankContext& context) {
        Twin twin(context, {}, {.strategy = strategy});
        NanCheck::install(twin.runtime);
        twin.step(forward_backward);
        twin.runtime->set_step(9);
        if (context.rank == 1) {
          spoil(twin.sharded->cells[2]->gain, 5, std::nan(""));
        }
        twin.run_sharded(forward_backward);
        NanCheck::check_reduced_gradients(*twin.runtime);
      });
    });
    EXPECT_THAT(
        error,
        AllOf(
            HasSubstr("rank 1/2 | step 9 | unit cell2"),
            HasSubstr("gradient that this rank computed"),
            HasSubstr("parameter cell2.gain is nan at flat element 5 of shape "
                      "[12]")));
  }
}

TEST(NanCheck, GradientsThatLayersWriteIntoTheSlot) {
  run_ranks(1, [](RankContext& context) {
    const auto configure = [](LabImpl& lab) {
      lab.cells[1]->body = [&lab](CellImpl& cell, at::Tensor x) {
        at::Tensor y = cell.up(x);
        if (lab.fail) {
          y.register_hook(
              std::function<at::Tensor(at::Tensor)>([](const at::Tensor& g) {
                at::Tensor spoilt = g.clone();
                spoilt.select(1, 3).fill_(kInf);  // output feature 3
                return spoilt;
              }));
        }
        return x + at::tanh(y * 0 + y.detach()) * cell.gain + y;
      };
    };
    Twin twin(context, configure);
    NanCheck::install(twin.runtime);
    twin.run_sharded(forward_backward);
    twin.sharded->fail = true;
    // Row 3 of [12, 12] starts at element 36.
    EXPECT_THAT(
        usage_error([&] { twin.run_sharded(forward_backward); }),
        AllOf(
            HasSubstr("parameter cell1.up.weight is "),
            HasSubstr(
                "at flat element 36 of shape [12, 12], the first of 12")));
    twin.runtime->reset();
    twin.sharded->fail = false;
    twin.run_sharded(forward_backward);
  });
}

// A weight sharded by columns: the index is an index of the full weight.
TEST(NanCheck, ASliceNamesTheElementOfTheWholeWeight) {
  run_ranks(2, [](RankContext& context) {
    const auto mesh = context.mesh({{"dp", 1}, {"tp", 2}});
    nn::Linear linear(/*in_features=*/3, /*out_features=*/4);  // of [4, 6]
    const auto runtime = fully_shard(
        *linear,
        mesh,
        {.placement_of =
             [&](const std::string&) {
               return ParameterPlacement::cut_over(
                   *mesh,
                   {"tp"},
                   TensorSlice().cut(1, context.rank, 2));
             },
         .group = {.precision = Precision::full()}});
    NanCheck::check_weights(*runtime);
    // Row 2, the last of three columns.
    runtime->groups().front()->weights().main().local()[8] = std::nan("");
    EXPECT_THAT(
        usage_error([&] { NanCheck::check_weights(*runtime); }),
        HasSubstr(fmt::format(
            "parameter weight is nan at flat element {} of shape [4, 6]",
            context.rank == 0 ? 14 : 17)));
    mesh->world().barrier();
  });
}

TEST(NanCheck, WeightsAndReducedGradientsByShard) {
  run_ranks(2, [](RankContext& context) {
    Twin twin(context, {}, {.strategy = "zero3"});
    twin.run_sharded(forward_backward);
    NanCheck::check_weights(*twin.runtime);
    NanCheck::check_reduced_gradients(*twin.runtime);
    twin.runtime->set_step(3);
    for (ParamGroup* group : twin.runtime->groups()) {
      const auto check = [&](const at::Tensor& flat, bool is_weight) {
        for (const NamedShard& shard : group->shards_of(flat)) {
          if (shard.tensor.numel() == 0) {
            continue;
          }
          const std::int64_t at = shard.tensor.numel() - 1;
          const float old = shard.tensor[at].item<float>();
          shard.tensor[at] = -kInf;
          const std::string error = usage_error([&] {
            is_weight ? NanCheck::check_weights(*twin.runtime)
                      : NanCheck::check_reduced_gradients(*twin.runtime);
          });
          shard.tensor[at] = old;
          EXPECT_THAT(
              error,
              AllOf(
                  HasSubstr(
                      is_weight ? "shard of the weight"
                                : "shard of the reduced gradient"),
                  HasSubstr(fmt::format(
                      "parameter {} is -inf at flat element {} of",
                      shard.name(),
                      shard.begin + at)),
                  HasSubstr(fmt::format("rank {}/2 | step 3", context.rank))));
        }
      };
      check(group->weights().main().local(), true);
      check(group->gradients().reduced().local(), false);
    }
    NanCheck::check_weights(*twin.runtime);
    NanCheck::check_reduced_gradients(*twin.runtime);
  });
}

TEST(NanCheck, CleanTrainingPasses) {
  for_strategies([](const RankContext& context, FullyShardOptions options) {
    Twin twin(context, {}, options);
    NanCheck::install(twin.runtime);
    for (int i = 0; i < 2; ++i) {
      twin.step(forward_backward);
      NanCheck::check_weights(*twin.runtime);
    }
  });
}

}  // namespace
}  // namespace flatshard::testing
