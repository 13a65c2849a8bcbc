#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <optional>

#include "flatshard/core/error.h"
#include "flatshard/launch/environment.h"

namespace flatshard {
namespace {

// Below the range from which systems choose ports automatically.
constexpr int kFirstSlurmPort = 20000;
constexpr int kNumSlurmPorts = 10000;

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? std::nullopt
                                            : std::optional<std::string>(value);
}

std::string required(const char* name, const char* because) {
  const auto value = variable(name);
  FLATSHARD_CHECK(
      value,
      config,
      "the environment variable {} is not set, but {} is; start the ranks "
      "with torchrun, srun or --nproc, or set it",
      name,
      because);
  return *value;
}

std::optional<int> parsed(const std::string& text) {
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end ? std::optional(value)
                                             : std::nullopt;
}

int number(const char* name, const std::string& text, int low, int high) {
  const std::optional<int> value = parsed(text);
  FLATSHARD_CHECK(
      value && *value >= low && *value <= high,
      config,
      "the environment variable {} is '{}'; expected a number from {} to {}",
      name,
      text,
      low,
      high);
  return *value;
}

constexpr int kMaxRanks = 1 << 24;

// A number that launchers other than torchrun left behind is unknown, too.
int torchrun_ranks_per_host(int world_size) {
  const auto given = [](const char* name) {
    return variable(name) ? parsed(*variable(name)) : std::nullopt;
  };
  const int ranks = given("LOCAL_WORLD_SIZE").value_or(0);
  if (ranks < 1 || world_size % ranks != 0) {
    return 0;
  }
  const int hosts = world_size / ranks;
  return given("GROUP_WORLD_SIZE").value_or(hosts) == hosts ? ranks : 0;
}

RankEnvironment from_torchrun() {
  RankEnvironment result;
  result.world_size =
      number("WORLD_SIZE", required("WORLD_SIZE", "RANK"), 1, kMaxRanks);
  result.rank =
      number("RANK", required("RANK", "WORLD_SIZE"), 0, result.world_size - 1);
  result.local_rank = number(
      "LOCAL_RANK",
      required("LOCAL_RANK", "RANK"),
      0,
      result.world_size - 1);
  if (result.world_size > 1) {
    result.master_addr = required("MASTER_ADDR", "RANK");
    result.master_port = static_cast<std::uint16_t>(
        number("MASTER_PORT", required("MASTER_PORT", "RANK"), 1, 65535));
  }
  result.launcher_serves_store =
      variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (const auto count = variable("TORCHELASTIC_RESTART_COUNT")) {
    result.restart_count =
        number("TORCHELASTIC_RESTART_COUNT", *count, 0, 1 << 20);
  }
  result.ranks_per_host = torchrun_ranks_per_host(result.world_size);
  if (const auto fd = variable("FLATSHARD_MASTER_LISTEN_FD")) {
    result.master_listen_fd =
        number("FLATSHARD_MASTER_LISTEN_FD", *fd, 0, 1 << 20);
  }
  return result;
}

// Reads "8" and "8(x2)". Several numbers ("8(x2),4") give 0.
int slurm_tasks_per_node() {
  for (const char* name :
       {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (const auto text = variable(name)) {
      const bool is_one = text->find(',') == std::string::npos;
      return is_one ? parsed(text->substr(0, text->find("(x"))).value_or(0) : 0;
    }
  }
  return 0;
}

RankEnvironment from_slurm() {
  RankEnvironment result;
  result.from_slurm = true;
  result.ranks_per_host = slurm_tasks_per_node();
  result.world_size =
      number("SLURM_NTASKS", *variable("SLURM_NTASKS"), 1, kMaxRanks);
  result.rank = number(
      "SLURM_PROCID",
      *variable("SLURM_PROCID"),
      0,
      result.world_size - 1);
  result.local_rank = number(
      "SLURM_LOCALID",
      required("SLURM_LOCALID", "SLURM_PROCID"),
      0,
      result.world_size - 1);
  if (const auto address = variable("MASTER_ADDR")) {
    result.master_addr = *address;
  } else {
    const auto nodes = variable("SLURM_JOB_NODELIST");
    result.master_addr = first_slurm_host(
        nodes ? *nodes : required("SLURM_NODELIST", "SLURM_PROCID"));
  }
  if (const auto port = variable("MASTER_PORT")) {
    result.master_port =
        static_cast<std::uint16_t>(number("MASTER_PORT", *port, 1, 65535));
  } else {
    const int job = number(
        "SLURM_JOB_ID",
        required("SLURM_JOB_ID", "SLURM_PROCID"),
        0,
        2147483647);
    result.master_port =
        static_cast<std::uint16_t>(kFirstSlurmPort + job % kNumSlurmPorts);
  }
  return result;
}

bool under_slurm() {
  const auto tasks = variable("SLURM_NTASKS");
  return variable("SLURM_PROCID") && tasks && *tasks != "1";
}

}  // namespace

bool in_slurm_batch_script() {
  // srun sets the number of its step; Slurm itself gives the batch script no
  // step, or one of the numbers that are reserved for it.
  constexpr std::int64_t kReservedSteps = 0xffff0000;
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEPID"}) {
    if (const auto step = variable(name)) {
      return std::strtoll(step->c_str(), nullptr, 10) >= kReservedSteps;
    }
  }
  return variable("SLURM_JOB_ID").has_value() && under_slurm() &&
         *variable("SLURM_PROCID") == "0" && !variable("SLURM_STEP_NUM_TASKS");
}

std::string slurm_conflict(int nproc) {
  if (variable("RANK") || !under_slurm()) {
    return {};
  }
  const std::string tasks = *variable("SLURM_NTASKS");
  if (!in_slurm_batch_script()) {
    return nproc == 0 || tasks == std::to_string(nproc)
               ? std::string()
               : fmt::format(
                     "--nproc: srun started this process as one of "
                     "SLURM_NTASKS = {} ranks, got --nproc {}; leave --nproc "
                     "out, and give srun one task for each rank (srun "
                     "--ntasks-per-node={})",
                     tasks,
                     nproc,
                     nproc);
  }
  const std::string nodes =
      variable("SLURM_NNODES")
          .value_or(variable("SLURM_JOB_NUM_NODES").value_or("1"));
  if (nproc == 0) {
    return fmt::format(
        "expected srun to start the SLURM_NTASKS = {} ranks of this Slurm job, "
        "got a process of the batch script itself; put srun before flatshard, "
        "or give --nproc to start the ranks on this node",
        tasks);
  }
  return nodes == "1"
             ? std::string()
             : fmt::format(
                   "--nproc {} starts ranks on one node, but this Slurm job "
                   "has {}; remove it and start flatshard with srun",
                   nproc,
                   nodes);
}

bool launched_by_environment() {
  return variable("RANK").has_value() || under_slurm();
}

RankEnvironment rank_environment_from_env() {
  const auto world = variable("WORLD_SIZE");
  if (variable("RANK") || (world && *world != "1")) {
    return from_torchrun();
  }
  return under_slurm() ? from_slurm() : RankEnvironment{};
}

std::string first_slurm_host(const std::string& nodelist) {
  const std::size_t end = nodelist.find_first_of(",[");
  const std::string prefix = nodelist.substr(0, end);
  std::string host = prefix;
  if (end != std::string::npos && nodelist[end] == '[') {
    const std::size_t close = nodelist.find(']', end);
    const std::size_t stop = nodelist.find_first_of(",-]", end);
    FLATSHARD_CHECK(
        close != std::string::npos && stop > end + 1,
        config,
        "cannot read the Slurm node list '{}'; set MASTER_ADDR",
        nodelist);
    host += nodelist.substr(end + 1, stop - end - 1);
    const std::size_t next = nodelist.find(',', close);
    host += nodelist.substr(close + 1, next - close - 1);
  }
  FLATSHARD_CHECK(
      !host.empty() && host.find_first_of("[]") == std::string::npos,
      config,
      "cannot read the Slurm node list '{}'; set MASTER_ADDR",
      nodelist);
  return host;
}

}  // namespace flatshard
