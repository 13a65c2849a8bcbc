// One rank per GPU; without GPUs it skips itself.
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flatshard/comm/make_communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/peer/peer_memory.h"
#include "tests/support/gpu_ranks.h"

namespace flatshard {
namespace {

using testing::gpu_ranks;
using ::testing::HasSubstr;

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "no GPU: NCCL is not tested";
    }
    rank = gpu_ranks().rank();
    world = gpu_ranks().world();
    options = at::TensorOptions(gpu_ranks().device);
  }

  std::shared_ptr<Mesh> mesh(std::vector<MeshAxis> axes) {
    static int count = 0;
    log = std::make_shared<CollectiveLog>();
    return gpu_ranks().mesh(
        std::move(axes),
        fmt::format("mesh{}", count++),
        log);
  }

  at::Tensor input_of(int r, std::int64_t numel, at::ScalarType dtype) const {
    return (at::arange(numel, options) * 3 + r * 5).remainder(7).to(dtype);
  }

  at::Tensor sum_of(std::int64_t numel, at::ScalarType dtype) const {
    at::Tensor sum = input_of(0, numel, at::kFloat);
    for (int r = 1; r < world; ++r) {
      sum += input_of(r, numel, at::kFloat);
    }
    return sum.to(dtype);
  }

  int rank = 0;
  int world = 1;
  at::TensorOptions options;
  std::shared_ptr<CollectiveLog> log;
};

TEST_F(Nccl, AllCollectivesOnAStreamOfTheirOwn) {
  const auto group = mesh({{"dp", world}});
  auto& gather = group->communicator(0, Purpose::gather);
  auto& reduce = group->communicator(0, Purpose::reduce);
  const auto stream = make_stream(
      gpu_ranks().device,
      "comm",
      {.high_priority = true, .max_delay_us = 200});
  constexpr std::int64_t kShard = 1000;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::Tensor shard = input_of(rank, kShard, dtype);
    const at::Tensor in = input_of(rank, kShard * world, dtype);
    const at::Tensor reduced = input_of(rank, 77, dtype);
    const at::Tensor sent = input_of(rank, 9, dtype);
    const at::Tensor full = at::empty({kShard * world}, in.options());
    const at::Tensor out = at::empty({kShard}, in.options());
    Event ready;
    ready.record(*current_stream(gpu_ranks().device));
    ready.wait(*stream);
    stream->submit([&] {
      gather.all_gather(full, shard);
      reduce.reduce_scatter(out, in, ReduceOp::sum);
      reduce.all_reduce(reduced, ReduceOp::sum);
      gather.broadcast(sent, world - 1);
    });
    Event done;
    done.record(*stream);
    done.wait(*current_stream(gpu_ranks().device));
    for (int r = 0; r < world; ++r) {
      EXPECT_TRUE(
          full.narrow(0, r * kShard, kShard).equal(input_of(r, kShard, dtype)))
          << dtype;
    }
    EXPECT_TRUE(out.equal(
        sum_of(kShard * world, dtype).narrow(0, rank * kShard, kShard)))
        << dtype;
    EXPECT_TRUE(reduced.equal(sum_of(77, dtype))) << dtype;
    EXPECT_TRUE(sent.equal(input_of(world - 1, 9, dtype))) << dtype;
  }
  group->world().barrier();
}

TEST_F(Nccl, AverageInPlaceGatherAndCoalescedLaunches) {
  const auto group = mesh({{"dp", world}});
  auto& comm = group->world();
  // A sum that the world divides, so that the mean is exact.
  const at::Tensor mean = at::full({33}, double(world), options) * (rank + 1);
  comm.all_reduce(mean, ReduceOp::avg);
  EXPECT_TRUE(mean.eq(world * (world + 1) / 2.0).all().item<bool>());

  const at::Tensor full = at::zeros({world * 5}, options);
  const at::Tensor own = full.narrow(0, rank * 5, 5);
  own.fill_(rank + 1);
  comm.all_gather(full, own);
  EXPECT_EQ(full.sum().item<double>(), 5 * world * (world + 1) / 2);

  const std::vector<at::Tensor> ins{
      input_of(rank, 3, at::kFloat),
      at::empty({0}, options),
      input_of(rank, 4, at::kFloat).to(at::kFloat8_e4m3fn)};
  const std::vector<at::Tensor> outs{
      at::empty({3 * world}, ins[0].options()),
      at::empty({0}, options),
      at::empty({4 * world}, ins[2].options())};
  comm.all_gather(outs, ins);
  const std::vector<at::Tensor> large{
      input_of(rank, 2 * world, at::kFloat),
      input_of(rank, 7 * world, at::kFloat)};
  const std::vector<at::Tensor> small{
      at::empty({2}, options),
      at::empty({7}, options)};
  comm.reduce_scatter(small, large, ReduceOp::sum);
  for (int r = 0; r < world; ++r) {
    EXPECT_TRUE(outs[0].narrow(0, r * 3, 3).equal(input_of(r, 3, at::kFloat)));
    EXPECT_TRUE(outs[2]
                    .narrow(0, r * 4, 4)
                    .to(at::kFloat)
                    .equal(input_of(r, 4, at::kFloat)));
  }
  for (const at::Tensor& part : small) {
    const std::int64_t n = part.numel();
    EXPECT_TRUE(
        part.equal(sum_of(n * world, at::kFloat).narrow(0, rank * n, n)));
  }
  EXPECT_EQ(log->records().size(), 4u);
}

TEST_F(Nccl, TwoAxes) {
  if (world % 2 != 0) {
    GTEST_SKIP() << "needs an even number of GPUs, got " << world;
  }
  const int inner_size = world / 2;
  const auto group = mesh({{"outer", 2}, {"dp", inner_size}});
  const at::Tensor all = at::empty({world}, options);
  group->world(Purpose::gather)
      .all_gather(all, at::full({1}, double(rank), options));
  for (int inner = 0; inner < inner_size; ++inner) {
    for (int outer = 0; outer < 2; ++outer) {
      EXPECT_EQ(all[inner * 2 + outer].item<int>(), outer * inner_size + inner);
    }
  }
  const at::Tensor sum = at::full({1}, double(rank), options);
  group->communicator(0, Purpose::reduce).all_reduce(sum, ReduceOp::sum);
  EXPECT_EQ(sum.item<int>(), 2 * (rank % inner_size) + inner_size);
}

TEST_F(Nccl, RefusesTensorsOfAnotherDevice) {
  const auto group = mesh({{"dp", world}});
  try {
    group->world().all_reduce(at::ones({2}), ReduceOp::sum);
    if (world > 1) {
      FAIL() << "no error";
    }
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("expected device cuda:"));
  }
}

TEST_F(Nccl, PeersReadWhatWasWrittenBeforeTheFence) {
  const auto ranks = mesh({{"dp", world}});
  Communicator& group = ranks->communicator(0, Purpose::gather);
  constexpr std::int64_t kNbytes = 5'000'001;
  const auto memory = PeerMemory::create(group, kNbytes);
  const at::Tensor copy = at::empty({kNbytes}, options.dtype(at::kByte));
  for (int round = 1; round <= 20; ++round) {
    memory->local().fill_(10 * rank + round);
    group.fence();
    for (int peer = 0; peer < world; ++peer) {
      copy_bytes(
          copy.mutable_data_ptr(),
          memory->of(peer).const_data_ptr(),
          kNbytes,
          gpu_ranks().device);
      EXPECT_TRUE(copy.eq(10 * peer + round).all().item<bool>())
          << "of rank " << peer << " in round " << round;
    }
    group.fence();  // before it is overwritten
  }
}

TEST_F(Nccl, MemoryOfARankThatGaveItUpStaysReadable) {
  const auto ranks = mesh({{"dp", world}});
  Communicator& group = ranks->communicator(0, Purpose::gather);
  constexpr std::int64_t kNbytes = std::int64_t{8} << 20;
  auto memory = PeerMemory::create(group, kNbytes);
  memory->local().fill_(rank + 1);
  group.barrier();
  if (rank == world - 1) {
    memory.reset();
    // Whatever now gets its place in the memory is not what peers read.
    at::full({16 * kNbytes}, 77, options.dtype(at::kByte));
  }
  group.barrier();
  if (rank != world - 1) {
    EXPECT_TRUE(memory->of(world - 1).eq(world).all().item<bool>());
  }
  group.barrier();
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
