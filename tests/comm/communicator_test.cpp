#include "flatshard/comm/communicator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/device/stream.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::RankContext;
using testing::run_ranks;

std::shared_ptr<Communicator> make(
    const RankContext& context,
    const std::string& name = "test") {
  auto communicator = context.gloo(name);
  communicator->set_log(context.log);
  return communicator;
}

// Small whole numbers, so that sums are exact in every dtype.
at::Tensor input_of(int rank, std::int64_t numel, at::ScalarType dtype) {
  return (at::arange(numel) * 3 + rank * 5).remainder(7).to(dtype);
}

at::Tensor sum_of(int world, std::int64_t numel, at::ScalarType dtype) {
  at::Tensor sum = input_of(0, numel, at::kLong);
  for (int r = 1; r < world; ++r) {
    sum += input_of(r, numel, at::kLong);
  }
  return sum.to(dtype);
}

const at::ScalarType kReducible[] = {
    at::kFloat,
    at::kDouble,
    at::kHalf,
    at::kBFloat16,
    at::kByte,
    at::kChar,
    at::kInt,
    at::kLong};

class Worlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Worlds, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Worlds, AllCollectivesInEveryDtype) {
  run_ranks(GetParam(), [](RankContext& context) {
    const auto communicator = make(context);
    const int world = context.world;
    ASSERT_EQ(communicator->rank(), context.rank);
    ASSERT_EQ(communicator->size(), world);
    for (const at::ScalarType dtype : kReducible) {
      constexpr std::int64_t kShard = 37;
      const auto options = at::TensorOptions(dtype);
      const at::Tensor shard = input_of(context.rank, kShard, dtype);
      const at::Tensor full = at::empty({kShard * world}, options);
      communicator->all_gather(full, shard);
      for (int r = 0; r < world; ++r) {
        EXPECT_TRUE(full.narrow(0, r * kShard, kShard)
                        .equal(input_of(r, kShard, dtype)))
            << dtype << " slice " << r;
      }

      const at::Tensor in = input_of(context.rank, kShard * world, dtype);
      const at::Tensor out = at::empty({kShard}, options);
      communicator->reduce_scatter(out, in, ReduceOp::sum);
      const at::Tensor sum = sum_of(world, kShard * world, dtype);
      EXPECT_TRUE(out.equal(sum.narrow(0, context.rank * kShard, kShard)))
          << dtype;
      EXPECT_TRUE(in.equal(input_of(context.rank, kShard * world, dtype)));

      // Below and above the size at which the algorithm changes, divisible
      // by the world or not.
      for (const std::int64_t numel : {1, 64, 5000, 8 * 9 * 5 * 40}) {
        const at::Tensor inout = input_of(context.rank, numel, dtype);
        communicator->all_reduce(inout, ReduceOp::sum);
        EXPECT_TRUE(inout.equal(sum_of(world, numel, dtype)))
            << dtype << " numel " << numel;
      }

      const at::Tensor sent = input_of(context.rank, 9, dtype);
      communicator->broadcast(sent, world - 1);
      EXPECT_TRUE(sent.equal(input_of(world - 1, 9, dtype))) << dtype;
    }
    communicator->barrier();
  });
}

TEST_P(Worlds, TheLargestOfBitsIsThatOfMagnitudes) {
  run_ranks(GetParam(), [](RankContext& context) {
    const auto communicator = make(context);
    constexpr float kInf = std::numeric_limits<float>::infinity();
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    for (const std::int64_t numel : {4, 6000}) {
      for (int bad = 0; bad < context.world; ++bad) {
        at::Tensor largest = at::full({numel}, context.rank * 0.5F);
        largest[0] = context.rank == bad ? kInf : 1.0F;
        largest[1] = context.rank == bad ? kNan : kInf;
        largest[numel - 1] = context.rank == bad ? kNan : 0.0F;
        communicator->all_reduce(largest.view(at::kInt), ReduceOp::max);
        EXPECT_EQ(largest[0].item<float>(), kInf);
        EXPECT_TRUE(largest[1].isnan().item<bool>());
        EXPECT_TRUE(largest[numel - 1].isnan().item<bool>());
        EXPECT_TRUE(largest.slice(0, 2, -1)
                        .eq((context.world - 1) * 0.5F)
                        .all()
                        .item<bool>());
      }
    }
  });
}

TEST_P(Worlds, AverageIsTheSumTimesOneOverSize) {
  run_ranks(GetParam(), [](RankContext& context) {
    const auto communicator = make(context);
    const int world = context.world;
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const bool wide = dtype == at::kFloat || dtype == at::kDouble;
      for (const std::int64_t shard : {8, 2000}) {
        const at::Tensor expected =
            (sum_of(world, shard * world, wide ? dtype : at::kFloat) *
             (1.0 / world))
                .to(dtype);
        const at::Tensor in = input_of(context.rank, shard * world, dtype);
        const at::Tensor out = at::empty({shard}, in.options());
        communicator->reduce_scatter(out, in, ReduceOp::avg);
        EXPECT_TRUE(out.equal(expected.narrow(0, context.rank * shard, shard)))
            << dtype;
        communicator->all_reduce(in, ReduceOp::avg);
        EXPECT_TRUE(in.equal(expected)) << dtype;
      }
    }
  });
}

TEST_P(Worlds, SumsAreTakenInRankOrder) {
  // 1e8 + 1 - 1e8 depends on the order in float32.
  run_ranks(GetParam(), [](RankContext& context) {
    const auto communicator = make(context);
    const auto value = [](int r) {
      return r % 3 == 0 ? 1e8F : r % 3 == 1 ? 1.0F : -1e8F;
    };
    float expected = value(0);
    for (int r = 1; r < context.world; ++r) {
      expected += value(r);
    }
    for (const std::int64_t numel : {4, 6000}) {
      const at::Tensor inout = at::full({numel}, value(context.rank));
      communicator->all_reduce(inout, ReduceOp::sum);
      EXPECT_TRUE(inout.eq(expected).all().item<bool>()) << numel;
    }
  });
}

TEST(Communicator, ReducedTypesRoundOnce) {
  // 256 + 1 is 256 in bfloat16: adding four ones one by one would lose them.
  run_ranks(5, [](RankContext& context) {
    const auto communicator = make(context);
    const at::Tensor inout = at::full(
        {16},
        context.rank == 0 ? 256.0 : 1.0,
        at::TensorOptions(at::kBFloat16));
    communicator->all_reduce(inout, ReduceOp::sum);
    EXPECT_TRUE(inout.eq(260.0).all().item<bool>());
  });
}

TEST_P(Worlds, GatherInPlaceAndCoalesced) {
  run_ranks(GetParam(), [](RankContext& context) {
    const auto communicator = make(context);
    const int world = context.world;
    const at::Tensor full = at::zeros({world * 5});
    const at::Tensor own = full.narrow(0, context.rank * 5, 5);
    own.copy_(input_of(context.rank, 5, at::kFloat));
    communicator->all_gather(full, own);

    // Several tensors of different dtypes, one of them empty.
    const std::vector<at::Tensor> ins{
        input_of(context.rank, 3, at::kBFloat16),
        at::empty({0}),
        input_of(context.rank, 4, at::kDouble)};
    const std::vector<at::Tensor> outs{
        at::empty({3 * world}, at::kBFloat16),
        at::empty({0}),
        at::empty({4 * world}, at::kDouble)};
    communicator->all_gather(outs, ins);
    for (int r = 0; r < world; ++r) {
      EXPECT_TRUE(full.narrow(0, r * 5, 5).equal(input_of(r, 5, at::kFloat)));
      EXPECT_TRUE(
          outs[0].narrow(0, r * 3, 3).equal(input_of(r, 3, at::kBFloat16)));
      EXPECT_TRUE(
          outs[2].narrow(0, r * 4, 4).equal(input_of(r, 4, at::kDouble)));
    }

    const std::vector<at::Tensor> reduce_ins{
        input_of(context.rank, 2 * world, at::kFloat),
        input_of(context.rank, 7 * world, at::kFloat)};
    const std::vector<at::Tensor> reduce_outs{at::empty({2}), at::empty({7})};
    communicator->reduce_scatter(reduce_outs, reduce_ins, ReduceOp::sum);
    for (int i = 0; i < 2; ++i) {
      const std::int64_t shard = reduce_outs[i].numel();
      EXPECT_TRUE(
          reduce_outs[i].equal(sum_of(world, shard * world, at::kFloat)
                                   .narrow(0, context.rank * shard, shard)));
    }
  });
}

TEST(Communicator, AGatherInPlaceDoesNotWriteTheOwnSlice) {
  run_ranks(2, [](RankContext& context) {
    // The comparison would end only when the peer arrives.
    const auto communicator = make_communicator(
        context.store,
        context.rank,
        context.world,
        "in place",
        at::kCPU,
        {.compare_collectives = false});
    const at::Tensor full = at::zeros({8});
    const at::Tensor own = full.narrow(0, context.rank * 4, 4);
    own.fill_(1);
    if (context.rank == 1) {
      context.store->wait({"rank 0 wrote"});
      communicator->all_gather(full, own);
      return;
    }
    std::thread gather([&] { communicator->all_gather(full, own); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    own.fill_(2);
    context.store->set("rank 0 wrote", "yes");
    gather.join();
    EXPECT_TRUE(own.eq(2).all().item<bool>()) << own;
    EXPECT_TRUE(full.narrow(0, 4, 4).eq(1).all().item<bool>()) << full;
  });
}

TEST(Communicator, GathersEveryDtype) {
  run_ranks(2, [](RankContext& context) {
    const auto communicator = make(context);
    for (const auto dtype :
         {at::kBool, at::kFloat8_e4m3fn, at::kComplexFloat}) {
      const at::Tensor in =
          at::full({4}, static_cast<double>(context.rank)).to(dtype);
      const at::Tensor out = at::zeros({8}).to(dtype);
      communicator->all_gather(out, in);
      const at::Tensor plain = out.to(at::kComplexFloat);
      EXPECT_EQ(at::real(plain[3]).item<float>(), 0) << dtype;
      EXPECT_EQ(at::real(plain[4]).item<float>(), 1) << dtype;
    }
  });
}

TEST(Communicator, LogHoldsEveryLaunch) {
  run_ranks(2, [](RankContext& context) {
    const auto communicator = make(context, "dp.gather");
    const std::vector<at::Tensor> ins{at::ones({2}), at::ones({3})};
    const std::vector<at::Tensor> outs{at::ones({4}), at::ones({6})};
    communicator->all_gather(outs, ins);
    communicator->reduce_scatter(
        at::ones({2}, at::kBFloat16),
        at::ones({4}, at::kBFloat16),
        ReduceOp::avg);
    communicator->all_reduce(at::ones({5}), ReduceOp::sum);
    communicator->broadcast(at::ones({6}, at::kLong), 1);
    communicator->barrier();
    communicator->all_gather(at::empty({0}), at::empty({0}));  // no launch
    const std::vector<CollectiveRecord> expected{
        {0, "dp.gather", CollectiveKind::all_gather, 10, at::kFloat},
        {1, "dp.gather", CollectiveKind::reduce_scatter, 4, at::kBFloat16},
        {2, "dp.gather", CollectiveKind::all_reduce, 5, at::kFloat},
        {3, "dp.gather", CollectiveKind::broadcast, 6, at::kLong},
        {4,
         "dp.gather",
         CollectiveKind::barrier,
         0,
         at::ScalarType::Undefined}};
    EXPECT_EQ(context.log->records(), expected);
    context.log->clear();
    EXPECT_TRUE(context.log->records().empty());
  });
}

// One rank of a pair is enough to see a check fail: nothing is launched.
TEST(Communicator, RefusesBadArgumentsByName) {
  run_ranks(2, [](RankContext& context) {
    const auto c = make(context, "pair");
    const auto gather = [&](at::Tensor out, at::Tensor in) {
      return message_of([&] { c->all_gather(out, in); });
    };
    EXPECT_THAT(
        gather(at::ones({5}), at::ones({2})),
        HasSubstr("all_gather on 'pair' with 2 ranks: expected 4 = 2 * 2 "
                  "elements in out, got 5"));
    EXPECT_THAT(
        gather(at::ones({4}, at::kDouble), at::ones({2})),
        HasSubstr("expected one dtype, got Double (out) and Float (in)"));
    EXPECT_THAT(
        gather(at::ones({4, 2}).t(), at::ones({4})),
        HasSubstr("out: expected a contiguous tensor"));
    EXPECT_THAT(
        gather(at::ones({4}), at::ones({2}, at::kMeta)),
        HasSubstr("in: expected device cpu, got meta"));
    EXPECT_THAT(
        gather(at::Tensor(), at::ones({2})),
        HasSubstr("an undefined one"));
    const at::Tensor whole = at::ones({4});
    EXPECT_THAT(
        gather(whole, whole.narrow(0, 1, 2)),
        HasSubstr("in may alias out only at this rank's own slice"));
    EXPECT_THAT(
        message_of([&] {
          c->reduce_scatter(
              whole.narrow(0, 2 * context.rank, 2),
              whole,
              ReduceOp::sum);
        }),
        HasSubstr("reduce_scatter on 'pair': out must not overlap in"));
    EXPECT_THAT(
        message_of([&] {
          c->all_gather(
              std::vector<at::Tensor>{whole},
              std::vector<at::Tensor>{});
        }),
        HasSubstr("as many inputs as outputs, got 1 out and 0 in"));
    EXPECT_THAT(
        message_of(
            [&] { c->all_reduce(at::ones({2}, at::kBool), ReduceOp::sum); }),
        HasSubstr("all_reduce on 'pair': cannot reduce dtype Bool"));
    EXPECT_THAT(
        message_of(
            [&] { c->all_reduce(at::ones({2}, at::kInt), ReduceOp::avg); }),
        HasSubstr("avg expects a floating dtype, got Int"));
    EXPECT_THAT(
        message_of([&] { c->all_reduce(at::ones({2}), ReduceOp::max); }),
        HasSubstr("max expects an all-reduce of int32, got Float"));
    EXPECT_THAT(
        message_of([&] { c->broadcast(whole, 2); }),
        HasSubstr("expected a root below 2, got 2"));
    c->barrier();  // still usable
  });
}

TEST(Communicator, AMissingPeerIsATimeoutThatNamesTheGroup) {
  try {
    make_communicator(
        make_local_store({.timeout = std::chrono::milliseconds(50)}),
        0,
        2,
        "alone",
        at::kCPU,
        {.timeout = std::chrono::milliseconds(50)});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::timeout);
    EXPECT_THAT(error.what(), HasSubstr("[rank 0/2 | alone | connect]"));
  }
}

TEST(Communicator, APeerThatLeavesIsACommError) {
  try {
    run_ranks(2, [](RankContext& context) {
      const auto communicator = make(context, "pair");
      if (context.rank == 1) {
        context.store->wait({"rank 0 is connected"});
      } else {
        context.store->set("rank 0 is connected", "yes");
        communicator->all_reduce(at::ones({3}), ReduceOp::sum);
      }
    });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::comm);
    EXPECT_THAT(error.what(), HasSubstr("[rank 0/2 | pair | all_reduce]"));
  }
}

// With more ranks than cores it would preempt the thread with the lock that the
// loop then tries to acquire again and again.
TEST(Communicator, GloosEventLoopPreemptsNobody) {
  if (::sched_getscheduler(0) != SCHED_OTHER) {
    GTEST_SKIP() << "this program has a scheduling policy of its own";
  }
  run_ranks(2, [](RankContext& context) {
    const auto communicator = make(context);
    EXPECT_EQ(::sched_getscheduler(0), SCHED_OTHER);
    int num_calm = 0;
    for (const auto& task :
         std::filesystem::directory_iterator("/proc/self/task")) {
      const int id = std::stoi(task.path().filename().string());
      num_calm += ::sched_getscheduler(id) == SCHED_BATCH;
    }
    EXPECT_EQ(num_calm, 1);  // one serves all groups
    communicator->barrier();
  });
}

TEST(Communicator, MakeRefusesByName) {
  EXPECT_THAT(
      message_of([] { make_communicator({}, 2, 2, "c", at::kCPU); }),
      HasSubstr("expected 0 <= rank < size, got rank 2 of 2"));
  EXPECT_THAT(
      message_of([] { make_communicator({}, 0, 2, "c", at::kMeta); }),
      HasSubstr("expected a device of type cpu or cuda, got 'meta'"));
}

}  // namespace
}  // namespace flatshard
