#include "flatshard/comm/store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "flatshard/core/error.h"
#include "flatshard/mesh/mesh.h"
#include "tests/support/ranks.h"

namespace flatshard {
namespace {

using ::testing::HasSubstr;
using testing::RankContext;
using testing::RankOutcome;

// A bound loopback port. If it is not listening, connections are refused.
class Port {
 public:
  explicit Port(bool listening) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t length = sizeof(address);
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), length), 0);
    if (listening) {
      EXPECT_EQ(listen(fd_, 8), 0);
    }
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    number_ = ntohs(address.sin_port);
  }
  ~Port() { close(fd_); }
  std::uint16_t number() const { return number_; }

 private:
  int fd_ = -1;
  std::uint16_t number_ = 0;
};

Error error_of(const RankEnvironment& environment) {
  try {
    make_tcp_store(environment, {.timeout = std::chrono::milliseconds(300)});
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::internal, "no error");
}

// Processes first: they need a program that has started no thread.
TEST(RankProcesses, MeetAndReduce) {
  testing::run_rank_processes(4, [](RankContext& context) {
    const auto mesh = context.mesh({{"outer", 2}, {"dp", 2}});
    const at::Tensor sum = at::full({5000}, context.rank + 1.0);
    mesh->world().all_reduce(sum, ReduceOp::sum);
    EXPECT_TRUE(sum.eq(10).all().item<bool>());
    mesh->world().barrier();
  });
}

TEST(RankProcesses, OutcomesTellHowRanksEnded) {
  const auto outcomes =
      testing::rank_process_outcomes(4, [](RankContext& context) {
        if (context.rank == 1) {
          FLATSHARD_THROW(usage, "expected by the test");
        }
        if (context.rank == 2) {
          EXPECT_TRUE(false) << "expected by the test";
        }
        if (context.rank == 3) {
          raise(SIGKILL);
        }
      });
  const std::vector<RankOutcome> expected{{0, 0}, {1, 0}, {2, 0}, {0, SIGKILL}};
  EXPECT_EQ(outcomes, expected);
}

TEST(RankProcesses, ADeadPeerIsAnErrorNotAHang) {
  const auto outcomes =
      testing::rank_process_outcomes(2, [](RankContext& context) {
        const auto mesh = context.mesh();
        if (context.rank == 1) {
          raise(SIGKILL);
        }
        try {
          mesh->world().all_reduce(at::ones({3}), ReduceOp::sum);
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::comm);
          EXPECT_THAT(
              error.what(),
              HasSubstr("[rank 0/2 | dp.reduce | all_reduce]"));
        }
      });
  const std::vector<RankOutcome> expected{{0, 0}, {0, SIGKILL}};
  EXPECT_EQ(outcomes, expected);
}

TEST(TcpStore, NeedsAnAddress) {
  EXPECT_THAT(
      error_of({.rank = 0, .world_size = 2}).what(),
      HasSubstr("set MASTER_ADDR and MASTER_PORT"));
}

// Whatever a launcher sets for a job of one rank.
TEST(TcpStore, OneRankNeedsNobody) {
  const Port taken(true);
  for (const RankEnvironment& environment :
       {RankEnvironment{},
        RankEnvironment{.master_addr = "host.invalid", .master_port = 1},
        RankEnvironment{
            .master_addr = "127.0.0.1",
           .master_port = taken.number(),
           .launcher_serves_store = true}}) {
    const auto store = make_tcp_store(environment);
    const auto mesh = Mesh::create({{"dp", 1}}, 0, store, at::kCPU);
    const at::Tensor one = at::ones({2});
    mesh->world().all_reduce(one, ReduceOp::sum);
    mesh->world().barrier();
    mesh->check();
    mesh->set_step(1);
    mesh->publish_failure("nobody listens");
    EXPECT_EQ(one.sum().item<float>(), 2);
    EXPECT_EQ(mesh->flight_recorder(), nullptr);
  }
}

// torchrun keeps its store when it starts the ranks again.
TEST(TcpStore, ARestartReadsNothingOfTheAttemptBefore) {
  const auto server = c10::make_intrusive<c10d::TCPStore>(
      "127.0.0.1",
      c10d::TCPStoreOptions{.port = 0, .isServer = true});
  RankEnvironment environment{
      .rank = 0,
      .world_size = 2,
      .master_addr = "127.0.0.1",
      .master_port = server->getPort(),
      .launcher_serves_store = true};
  make_tcp_store(environment)->set("key", std::string("old"));
  EXPECT_TRUE(make_tcp_store(environment)->check({"key"}));
  environment.restart_count = 1;
  EXPECT_FALSE(make_tcp_store(environment)->check({"key"}));
}

TEST(TcpStore, APortInUseIsNamed) {
  const Port taken(true);
  const Error error = error_of(
      {.rank = 0,
       .world_size = 2,
       .master_addr = "127.0.0.1",
       .master_port = taken.number()});
  EXPECT_EQ(error.code(), ErrorCode::comm);
  EXPECT_THAT(
      error.what(),
      HasSubstr(fmt::format(
          "cannot serve the store at 127.0.0.1:{}: the port is in use; set "
          "MASTER_PORT",
          taken.number())));
}

TEST(TcpStore, NobodyServesIsATimeoutThatNamesTheAddress) {
  const Port silent(false);
  const Error error = error_of(
      {.rank = 1,
       .world_size = 2,
       .master_addr = "127.0.0.1",
       .master_port = silent.number()});
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_THAT(
      error.what(),
      HasSubstr(fmt::format(
          "no store answered at 127.0.0.1:{} within 300 ms",
          silent.number())));
}

TEST(TcpStore, MissingRanksAreATimeout) {
  std::uint16_t port = 0;
  {
    const Port free(false);
    port = free.number();
  }
  const Error error = error_of(
      {.rank = 0,
       .world_size = 2,
       .master_addr = "127.0.0.1",
       .master_port = port});
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_THAT(error.what(), HasSubstr("expected 2 ranks within 300 ms"));
  // Both sides print this while they wait. For ranks of Slurm, the message also
  // gives the source of the number of ranks.
  for (const int rank : {0, 1}) {
    ::testing::internal::CaptureStderr();
    try {
      make_tcp_store(
          {.rank = rank,
           .world_size = 2,
           .master_addr = "127.0.0.1",
           .master_port = port,
           .from_slurm = true},
          {.timeout = std::chrono::milliseconds(300),
           .silence = std::chrono::milliseconds(20)});
      ADD_FAILURE() << "expected an error";
    } catch (const Error&) {}
    EXPECT_THAT(
        ::testing::internal::GetCapturedStderr(),
        HasSubstr(fmt::format(
            "waiting for rank {} of 2 at 127.0.0.1:{}; SLURM_NTASKS is",
            1 - rank,
            port)));
  }
  EXPECT_THAT(
      error.what(),
      HasSubstr(fmt::format("waiting for rank 1 of 2 at 127.0.0.1:{}", port)));
}

TEST(PrefixStore, SeparatesKeysAndNeedsAStore) {
  const StoreHandle store = make_local_store();
  const std::vector<std::uint8_t> value{7};
  make_prefix_store("a", store)->set("key", value);
  EXPECT_TRUE(make_prefix_store("a", store)->check({"key"}));
  EXPECT_FALSE(make_prefix_store("b", store)->check({"key"}));
  EXPECT_THROW(make_prefix_store("a", {}), Error);
}

}  // namespace
}  // namespace flatshard
