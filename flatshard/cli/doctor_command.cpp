#include "flatshard/cli/doctor_command.h"

#include "flatshard/cli/rank_process.h"
#include "flatshard/cli/train_command.h"
#include "flatshard/core/error.h"
#include "flatshard/device/capability.h"
#include "flatshard/device/device_name.h"
#include "flatshard/device/stream.h"
#include "flatshard/diagnostics/machine.h"
#include "flatshard/launch/environment.h"
#include "flatshard/launch/local_ranks.h"
#include "flatshard/peer/peer_memory.h"
#include "flatshard/train/run/try_step.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>

namespace flatshard {
namespace {

constexpr int kRanks = 2;
// Losses are about 4; bfloat16 and FP8 matmuls round differently on a GPU.
constexpr double kLossTolerance = 0.05;

void print_fact(const std::string& name, const std::string& value) {
  fmt::print("{:<18} {}\n", name, value);
  std::fflush(stdout);
}

void print_facts(const std::vector<Fact>& facts) {
  for (const Fact& fact : facts) {
    print_fact(fact.name, fact.value);
  }
}

void print_machine() {
  print_facts(build_facts());
  print_facts(machine_facts());
  for (const GpuKind& kind : gpu_kinds()) {
    fmt::print("{}", describe(kind));
  }
}

/// The problems that a doctor finds, each printed when it is found.
class Problems {
 public:
  /// Runs a trial and prints how it ended.
  template <class F>
  void trial(const std::string& name, F&& run) {
    try {
      run();
      print_fact(name, "works");
    } catch (const c10::Error& error) {
      add(name, error.what_without_backtrace());
    } catch (const std::exception& error) {
      add(name, error.what());
    }
  }
  void add(const std::string& name, const std::string& why) {
    print_fact(name, "FAILED");
    found_.push_back(fmt::format("{}: {}", name, why));
  }
  const std::vector<std::string>& found() const { return found_; }

 private:
  std::vector<std::string> found_;
};

void check_loss(double loss, const std::string& kind) {
  const double want = try_step(Mesh::single(at::kCPU), kind);
  FLATSHARD_CHECK(
      std::abs(loss - want) <= kLossTolerance,
      cuda,
      "expected a loss of {:.4f} as on the CPU, got {:.4f}",
      want,
      loss);
}

void try_gpu(const GpuKind& kind, Problems& problems) {
  const at::Device gpu(
      at::kCUDA,
      static_cast<c10::DeviceIndex>(kind.gpus.front()));
  const auto name = [&](const std::string& step) {
    return fmt::format("GPU {}, a step: {}", kind.gpus.front(), step);
  };
  try {
    check_gpu(gpu);
  } catch (const std::exception& error) {
    problems.add(name("any"), error.what());
    return;
  }
  set_current_device(gpu);
  for (const std::string& step : step_kinds()) {
    problems.trial(name(step), [&] {
      check_loss(try_step(Mesh::single(gpu), step), step);
    });
  }
}

// Tests memory shared by ranks, as copies between GPUs use it. Collective.
void try_peer_memory(Communicator& group) {
  constexpr std::int64_t kNbytes = std::int64_t{4} << 20;
  std::unique_ptr<PeerMemory> memory;
  const bool fast = PeerMemory::has_fast_links(group);
  std::string outcome;
  try {
    memory = PeerMemory::create(group, kNbytes);
  } catch (const Error& error) {
    outcome = fmt::format("none; NCCL does it all ({})", error.message());
  }
  const auto fence = [&] {
    at::Tensor word = at::zeros({1}, at::TensorOptions(group.device()));
    group.all_reduce(word, ReduceOp::sum);
    (void)word.item<float>();
  };
  if (memory != nullptr) {
    at::Tensor own = memory->local();
    own.fill_(1 + group.rank());
    fence();
    for (int rank = 0; rank < group.size(); ++rank) {
      FLATSHARD_CHECK(
          memory->of(rank).eq(1 + rank).all().item<bool>(),
          cuda,
          "memory of rank {} on its GPU: a copy arrives with other bytes; turn "
          "off the IOMMU or PCIe ACS of this host, or set "
          "parallelism.copy_engines = \"none\"",
          rank);
    }
    fence();
    outcome = fast ? "work, over NVLink" : "work; NCCL is preferred to PCIe";
  }
  if (group.rank() == 0) {
    print_fact("peer copies", outcome);
  }
}

// Runs the part of each of two ranks.
void try_as_rank() {
  prepare_rank_process();
  const RankEnvironment env = rank_environment_from_env();
  const bool on_gpus = num_cuda_devices() >= env.world_size;
  const at::Device device =
      on_gpus
          ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(env.local_rank))
          : at::Device(at::kCPU);
  if (on_gpus) {
    set_current_device(device);
  }
  try {
    const auto mesh = Mesh::create(
        {{"dp", env.world_size}},
        env.rank,
        make_tcp_store(env),
        device,
        {.communicator = {.timeout = std::chrono::minutes(1)}});
    for (const std::string& step : step_kinds()) {
      const double loss = try_step(mesh, step);
      if (env.rank == 0) {
        check_loss(loss, step);
        print_fact(
            fmt::format(
                "{} ranks over {}: {}",
                env.world_size,
                device.is_cuda() ? "NCCL" : "Gloo",
                step),
            "works");
      }
    }
    if (device.is_cuda()) {
      try_peer_memory(mesh->world());
    }
  } catch (const std::exception& error) {
    report_failure(error);
    std::fflush(nullptr);
    std::_Exit(1);  // destructors would wait for the peer
  }
}

// Runs all that one process can try, and returns the exit code.
int examine() {
  print_machine();
  Problems problems;
  if (built_for_gpus().empty() && std::filesystem::exists("/dev/nvidia0")) {
    problems.add(
        "GPUs",
        "this machine has GPUs, and this build has no CUDA code; build it "
        "again with FLATSHARD_CUDA=on");
  }
  for (const std::string& step : step_kinds()) {
    problems.trial("CPU, a step: " + step, [&] {
      try_step(Mesh::single(at::kCPU), step);
    });
  }
  for (const GpuKind& kind : gpu_kinds()) {
    try_gpu(kind, problems);
  }
  if (num_cuda_devices() > 1) {
    problems.trial("copies of all pairs", [] {
      const auto wrong = try_peer_copies();
      FLATSHARD_CHECK(wrong.empty(), cuda, "{}", fmt::join(wrong, "\n"));
    });
  }
  for (const std::string& problem : problems.found()) {
    fmt::print("does not work: {}\n", problem);
  }
  return problems.found().empty() ? 0 : 1;
}

// This process must not load torch, because torch's threads could receive the
// signals of the ranks that it waits for.
int run_doctor(std::vector<std::string> argv) {
  argv.emplace_back("--as-rank");
  argv.emplace_back("alone");
  const int alone = spawn_local_ranks(1, argv);
  argv.back() = "ranks";
  const int ranks = spawn_local_ranks(kRanks, argv);
  if (ranks != 0) {
    fmt::print(
        "does not work: {} ranks exited with {}: see the error above\n",
        kRanks,
        ranks);
  }
  return alone == 0 && ranks == 0 ? 0 : 1;
}

}  // namespace

void add_doctor_command(
    CLI::App& program,
    const std::vector<std::string>& argv) {
  CLI::App* command = program.add_subcommand(
      "doctor",
      "Check the installation: run a training step on the CPU and on each type "
      "of GPU, test two ranks, and test copies between GPUs. Exits with 1 and "
      "the reason on failure");
  const auto as_rank = std::make_shared<std::string>();
  command
      ->add_option("--as-rank", *as_rank)  // used by the doctor itself
      ->group("")
      ->check(CLI::IsMember({"alone", "ranks"}));
  command->callback([as_rank, argv] {
    if (*as_rank == "ranks") {
      try_as_rank();
      return;
    }
    const int code = as_rank->empty() ? run_doctor(argv) : examine();
    if (code != 0) {
      claim_failure_report();  // the reason is printed
      throw CLI::RuntimeError(code);
    }
  });
}

void add_info_command(CLI::App& program, const std::string& version) {
  CLI::App* command = program.add_subcommand(
      "info",
      "Print the versions of this build, the machine and its GPUs");
  command->callback([version] {
    print_fact("flatshard", version);
    print_machine();
  });
}

}  // namespace flatshard
