#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "flatshard/core/error.h"
#include "flatshard/launch/environment.h"

namespace flatshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Exactly these variables of a launcher, and the old ones afterwards.
class ScopedVariables {
 public:
  explicit ScopedVariables(const std::map<std::string, std::string>& wanted) {
    for (const char* name :
         {"RANK",
          "WORLD_SIZE",
          "LOCAL_RANK",
          "LOCAL_WORLD_SIZE",
          "GROUP_WORLD_SIZE",
          "MASTER_ADDR",
          "MASTER_PORT",
          "TORCHELASTIC_USE_AGENT_STORE",
          "FLATSHARD_MASTER_LISTEN_FD",
          "SLURM_PROCID",
          "SLURM_NTASKS",
          "SLURM_LOCALID",
          "SLURM_JOB_ID",
          "SLURM_JOB_NODELIST",
          "SLURM_NODELIST",
          "SLURM_STEP_ID",
          "SLURM_STEPID",
          "SLURM_STEP_NUM_TASKS",
          "SLURM_STEP_TASKS_PER_NODE",
          "SLURM_TASKS_PER_NODE",
          "SLURM_NNODES",
          "SLURM_JOB_NUM_NODES"}) {
      if (const char* value = std::getenv(name)) {
        before_[name] = value;
      }
      unsetenv(name);
      all_.push_back(name);
    }
    for (const auto& [name, value] : wanted) {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }
  ~ScopedVariables() {
    for (const char* name : all_) {
      unsetenv(name);
    }
    for (const auto& [name, value] : before_) {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }

 private:
  std::vector<const char*> all_;
  std::map<std::string, std::string> before_;
};

std::string message_of_read(const std::map<std::string, std::string>& wanted) {
  const ScopedVariables variables(wanted);
  try {
    rank_environment_from_env();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::config);
    return error.what();
  }
  return "no error";
}

const std::map<std::string, std::string> kTorchrun{
    {"RANK", "3"},
    {"WORLD_SIZE", "8"},
    {"LOCAL_RANK", "1"},
    {"MASTER_ADDR", "node1"},
    {"MASTER_PORT", "29500"}};

const std::map<std::string, std::string> kSlurm{
    {"SLURM_PROCID", "5"},
    {"SLURM_NTASKS", "16"},
    {"SLURM_LOCALID", "1"},
    {"SLURM_JOB_ID", "123456"},
    {"SLURM_JOB_NODELIST", "gpu[007-009,12],big1"}};

std::map<std::string, std::string> with(
    std::map<std::string, std::string> base,
    const std::string& name,
    const std::string& value) {
  base[name] = value;
  return base;
}

TEST(RankEnvironment, AloneIsOneRank) {
  const ScopedVariables variables({});
  EXPECT_FALSE(launched_by_environment());
  const RankEnvironment environment = rank_environment_from_env();
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.world_size, 1);
}

TEST(RankEnvironment, Torchrun) {
  const ScopedVariables variables(kTorchrun);
  EXPECT_TRUE(launched_by_environment());
  const RankEnvironment environment = rank_environment_from_env();
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.world_size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.master_addr, "node1");
  EXPECT_EQ(environment.master_port, 29500);
  EXPECT_FALSE(environment.launcher_serves_store);
  EXPECT_EQ(environment.master_listen_fd, -1);
}

TEST(RankEnvironment, TorchrunServesTheStoreItself) {
  const ScopedVariables variables(with(
      with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True"),
      "TORCHELASTIC_RESTART_COUNT",
      "3"));
  EXPECT_TRUE(rank_environment_from_env().launcher_serves_store);
  EXPECT_EQ(rank_environment_from_env().restart_count, 3);
}

TEST(RankEnvironment, LaunchersCountTheRanksOfAHost) {
  const auto counted = [](const std::map<std::string, std::string>& base,
                          const std::string& name,
                          const std::string& value) {
    const ScopedVariables variables(with(base, name, value));
    return rank_environment_from_env().ranks_per_host;
  };
  EXPECT_EQ(counted(kTorchrun, "LOCAL_WORLD_SIZE", "4"), 4);
  EXPECT_EQ(counted(kTorchrun, "LOCAL_WORLD_SIZE", ""), 0);
  for (const char* wrong : {"0", "3", "16", "-4", "many"}) {
    EXPECT_EQ(counted(kTorchrun, "LOCAL_WORLD_SIZE", wrong), 0) << wrong;
  }
  const auto fours = with(kTorchrun, "LOCAL_WORLD_SIZE", "4");
  EXPECT_EQ(counted(fours, "GROUP_WORLD_SIZE", "2"), 4);
  // Hosts of 4, 2 and 2 ranks.
  EXPECT_EQ(counted(fours, "GROUP_WORLD_SIZE", "3"), 0);
  EXPECT_EQ(counted(kSlurm, "SLURM_STEP_TASKS_PER_NODE", "8"), 8);
  EXPECT_EQ(counted(kSlurm, "SLURM_TASKS_PER_NODE", "8(x2)"), 8);
  EXPECT_EQ(counted(kSlurm, "SLURM_TASKS_PER_NODE", "8(x2),4"), 0);
  EXPECT_EQ(counted(kSlurm, "SLURM_TASKS_PER_NODE", "8,4"), 0);
  EXPECT_EQ(counted(kSlurm, "SLURM_TASKS_PER_NODE", "many"), 0);
}

TEST(RankEnvironment, SlurmDerivesTheAddress) {
  const ScopedVariables variables(kSlurm);
  EXPECT_TRUE(launched_by_environment());
  const RankEnvironment environment = rank_environment_from_env();
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.world_size, 16);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.master_addr, "gpu007");
  EXPECT_EQ(environment.master_port, 23456);
}

TEST(RankEnvironment, SlurmWithAGivenAddress) {
  const ScopedVariables variables(
      with(with(kSlurm, "MASTER_ADDR", "head"), "MASTER_PORT", "1234"));
  const RankEnvironment environment = rank_environment_from_env();
  EXPECT_EQ(environment.master_addr, "head");
  EXPECT_EQ(environment.master_port, 1234);
}

TEST(RankEnvironment, ASlurmJobOfOneTaskIsNotALaunch) {
  const ScopedVariables variables(with(kSlurm, "SLURM_NTASKS", "1"));
  EXPECT_FALSE(launched_by_environment());
  EXPECT_EQ(rank_environment_from_env().world_size, 1);
}

TEST(RankEnvironment, TheBatchScriptOfASlurmJobIsNoRank) {
  auto script = with(with(kSlurm, "SLURM_PROCID", "0"), "SLURM_NTASKS", "8");
  {
    const ScopedVariables variables(script);
    EXPECT_TRUE(in_slurm_batch_script());
    EXPECT_THAT(
        slurm_conflict(0),
        AllOf(
            HasSubstr("SLURM_NTASKS = 8"),
            HasSubstr("put srun before flatshard, or give --nproc")));
    // On one node, --nproc is sufficient.
    EXPECT_EQ(slurm_conflict(8), "");
    EXPECT_EQ(slurm_conflict(4), "");
  }
  {
    const ScopedVariables variables(with(script, "SLURM_NNODES", "2"));
    EXPECT_THAT(
        slurm_conflict(8),
        AllOf(HasSubstr("--nproc 8"), HasSubstr("this Slurm job has 2")));
  }
  {
    const ScopedVariables variables(with(script, "SLURM_STEPID", "4294967291"));
    EXPECT_TRUE(in_slurm_batch_script());
  }
  // srun has started all of them.
  const ScopedVariables variables(with(script, "SLURM_STEP_ID", "0"));
  EXPECT_FALSE(in_slurm_batch_script());
  EXPECT_EQ(slurm_conflict(0), "");
  EXPECT_EQ(slurm_conflict(8), "");
  EXPECT_THAT(
      slurm_conflict(4),
      AllOf(HasSubstr("SLURM_NTASKS = 8"), HasSubstr("got --nproc 4")));
}

TEST(RankEnvironment, OtherLaunchersDoNotContradictNproc) {
  {
    const ScopedVariables variables({});
    EXPECT_EQ(slurm_conflict(8), "");
  }
  {
    const ScopedVariables variables(kTorchrun);
    EXPECT_EQ(slurm_conflict(8), "");
  }
  const ScopedVariables variables(with(kSlurm, "SLURM_NTASKS", "1"));
  EXPECT_EQ(slurm_conflict(8), "");
}

TEST(RankEnvironment, MissingVariablesAreNamed) {
  for (const char* name :
       {"WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    auto variables = kTorchrun;
    variables.erase(name);
    EXPECT_THAT(
        message_of_read(variables),
        HasSubstr(
            std::string("the environment variable ") + name + " is not set"));
  }
  EXPECT_THAT(
      message_of_read({{"WORLD_SIZE", "4"}}),
      HasSubstr("the environment variable RANK is not set, but WORLD_SIZE is"));
  auto slurm = kSlurm;
  slurm.erase("SLURM_JOB_NODELIST");
  EXPECT_THAT(message_of_read(slurm), HasSubstr("SLURM_NODELIST is not set"));
}

TEST(RankEnvironment, BadValuesAreNamed) {
  EXPECT_THAT(
      message_of_read(with(kTorchrun, "RANK", "8")),
      HasSubstr("RANK is '8'; expected a number from 0 to 7"));
  EXPECT_THAT(
      message_of_read(with(kTorchrun, "WORLD_SIZE", "many")),
      HasSubstr("WORLD_SIZE is 'many'; expected a number"));
  EXPECT_THAT(
      message_of_read(with(kTorchrun, "MASTER_PORT", "70000")),
      HasSubstr("MASTER_PORT is '70000'"));
}

TEST(FirstSlurmHost, ReadsNodeLists) {
  EXPECT_EQ(first_slurm_host("login1"), "login1");
  EXPECT_EQ(first_slurm_host("a,b"), "a");
  EXPECT_EQ(first_slurm_host("gpu[007-9,12],b"), "gpu007");
  EXPECT_EQ(first_slurm_host("gpu[3,5]"), "gpu3");
  EXPECT_EQ(first_slurm_host("n[01-02].cluster.org,m1"), "n01.cluster.org");
  for (const char* bad : {"", "[", "gpu[", "gpu[]", "gpu[1-2]x[3-4]"}) {
    EXPECT_THROW(first_slurm_host(bad), Error) << bad;
  }
}

}  // namespace
}  // namespace flatshard
