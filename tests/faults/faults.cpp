#include "tests/faults/faults.h"

#include "flatshard/core/error.h"
#include "flatshard/device/stream.h"
#include "flatshard/graphs/step_graph.h"
#include "flatshard/optim/sgd.h"
#include "tests/runtime/training.h"
#include "tests/support/temp_folder.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>

namespace flatshard::testing {
namespace {

constexpr std::int64_t kDim = 16;
constexpr int kBlocks = 3;

// Called before the step, so the other ranks wait for the first all-gather of
// the step.
void do_wrong(Fault fault, ToyModel& model, const Mesh& mesh) {
  auto& blocks = model->blocks();
  switch (fault) {
    case Fault::kill:
      ::raise(SIGKILL);
      break;
    case Fault::stop:
      ::raise(SIGSTOP);
      break;
    case Fault::exit:
      ::_exit(0);
    case Fault::exception:
      throw std::runtime_error("the data loader broke");
    case Fault::no_memory:
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "CUDA out of memory. Tried to allocate 2.00 GiB");
    case Fault::hang:
      while (!mesh.flight_recorder()->verdict()) {
        ::poll(nullptr, 0, 5);
      }
      break;
    case Fault::skip_unit:
      blocks.erase(blocks.begin() + 1);
      break;
    case Fault::other_order:
      std::swap(blocks[0], blocks[1]);
      break;
    default:
      break;
  }
}

// The current stream's next work has to wait for this.
void hold_device(at::Device device, std::chrono::seconds timeout) {
  // A stream draws its delays: one of them may be short.
  const auto slow = make_stream(
      device,
      "slow",
      {.delay_seed = 1,
       .max_delay_us = static_cast<int>(1000000 * timeout.count())});
  for (int i = 0; i < 8; ++i) {
    slow->submit([] {});
  }
  Event end;
  end.record(*slow);
  end.wait(*current_stream(device));
}

void train(
    const FaultCase& c,
    const RankContext& context,
    const std::shared_ptr<Mesh>& mesh) {
  const bool wrong = context.rank == c.culprit;
  const bool wide = wrong && c.fault == Fault::other_size;
  const bool rounded = wrong && c.fault == Fault::other_dtype;
  const std::int64_t dim = wide ? 2 * kDim : kDim;
  const Precision precision =
      rounded ? Precision{.compute = at::kBFloat16, .reduce = at::kBFloat16}
              : Precision::full();
  ToyModel model(dim, kBlocks, /*with_root_parameter=*/false);
  FullyShardOptions options{
      .units = model->unit_modules(),
      .strategy = c.strategy,
      .group = {.precision = precision}};
  if (c.copy_engines) {
    options.runtime.copy_engines = {
        .gathers = CopyEngines::Gathers::all,
        .reductions_nbytes = 1 << 20};
  }
  options.runtime.graphs = {
      .enabled = c.whole_step,
      .whole_step = c.whole_step,
      .warmup_steps = 1,
      .emulate_on_cpu = true};
  const auto runtime = fully_shard(*model, mesh, options);
  const auto forward_backward = [&](const nn::TensorList& in) {
    const at::Tensor loss = model(in[0], in[1]);
    loss.backward();
    return nn::TensorList{loss};
  };
  std::optional<StepGraph> graph;
  if (c.whole_step) {
    graph.emplace(runtime, forward_backward);
  }
  Sgd optimizer(runtime->groups(), SgdOptions{});
  for (int step = 1; step <= c.steps; ++step) {
    runtime->set_step(step);
    if (wrong && step == kFaultStep) {
      do_wrong(c.fault, model, *mesh);
      if (c.fault == Fault::device_hang) {
        hold_device(mesh->device(), c.timeout);
      }
    }
    if (!wrong && step == kFaultStep) {
      std::this_thread::sleep_for(c.others_compute);
    }
    const auto like = at::TensorOptions().device(mesh->device());
    const at::Tensor x =
        at::full({2, dim}, 0.1 * step, like.dtype(precision.compute));
    const nn::TensorList in{x, at::zeros({2, dim}, like)};
    const at::Tensor loss = (graph ? graph->run(in) : forward_backward(in))[0];
    optimizer.step(1e-2, {});
    optimizer.zero_grad();
    loss.item<float>();
    mesh->check();
  }
  runtime->synchronize();
  EXPECT_TRUE(!graph || graph->stats().step_replays == c.steps - 1);
}

// Returns the path of the message file of this process (one
// rank).
std::filesystem::path& report_path() {
  static std::filesystem::path path;
  return path;
}

// Does the same as `flatshard train` when the communicators cannot be ended.
void leave_with(const Verdict& verdict) {
  std::ofstream(report_path()) << verdict.text;
  ::_exit(0);
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::vector<FaultReport> run_reporting(
    int world,
    const std::function<void(RankContext&)>& function) {
  const TempFolder folder;
  const auto path = [&](int rank) {
    return folder / fmt::format("rank_{}", rank);
  };
  const auto outcomes = rank_process_outcomes(
      world,
      [&](RankContext& context) {
        report_path() = path(context.rank);
        try {
          function(context);
        } catch (const std::exception& error) {
          std::ofstream(report_path()) << error.what();
        }
      },
      std::chrono::seconds(90));
  std::vector<FaultReport> reports;
  for (int rank = 0; rank < world; ++rank) {
    reports.push_back({outcomes[rank], read_file(path(rank))});
  }
  return reports;
}

std::vector<FaultReport> run_with_fault(const FaultCase& c) {
  return run_reporting(c.world, [&](RankContext& context) {
    at::Device device = c.device;
    if (c.device == at::kCUDA) {
      ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 1);
      ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", 1);
      ::setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", 1);
      if (c.world > c.num_gpus) {
        const int host = context.rank / c.num_gpus;
        ::setenv("NCCL_HOSTID", fmt::format("host{}", host).c_str(), 1);
      }
      const int gpu = context.rank % c.num_gpus;
      device = {at::kCUDA, static_cast<c10::DeviceIndex>(gpu)};
      set_current_device(device);
    }
    std::vector<MeshAxis> axes;
    for (const std::int64_t size : c.mesh) {
      axes.push_back({axes.empty() ? "outer" : "dp", size});
    }
    // Nothing of a mesh remains, also after a fault.
    struct Ends {
      std::weak_ptr<FlightRecorder> flight;
      ~Ends() { EXPECT_TRUE(flight.expired()); }
    } ends;
    const auto mesh = Mesh::create(
        axes.empty() ? std::vector<MeshAxis>{{"dp", c.world}} : axes,
        context.rank,
        context.store,
        device,
        {.communicator = {.timeout = c.timeout},
         .on_stuck_abort = c.whole_step || c.fault == Fault::device_hang
                               ? leave_with
                               : OnStuckAbort()});
    ends.flight = mesh->flight_recorder();
    try {
      train(c, context, mesh);
    } catch (const std::exception& error) {
      mesh->publish_failure(error.what());
      throw;
    }
  });
}

}  // namespace flatshard::testing
