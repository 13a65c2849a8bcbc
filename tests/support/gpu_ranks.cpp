#include "tests/support/gpu_ranks.h"

#include "flatshard/device/stream.h"
#include "flatshard/launch/local_ranks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <iostream>

namespace flatshard::testing {
namespace {

GpuRanks& self() {
  static GpuRanks instance;
  return instance;
}

// Without a call into CUDA: the ranks are forked.
int num_gpu_files() {
  int count = 0;
  while (std::filesystem::exists(fmt::format("/dev/nvidia{}", count))) {
    ++count;
  }
  return count;
}

}  // namespace

std::shared_ptr<Mesh> GpuRanks::mesh(
    std::vector<MeshAxis> axes,
    const std::string& name,
    std::shared_ptr<CollectiveLog> log) const {
  return Mesh::create(
      std::move(axes),
      rank(),
      store,
      device,
      {.communicator = {.timeout = std::chrono::minutes(2)},
       .log = std::move(log),
       .name = name});
}

const GpuRanks& gpu_ranks() {
  return self();
}

int gpu_ranks_main(int argc, char** argv) {
  if (!launched_by_environment() && num_gpu_files() > 1) {
    return spawn_local_ranks(num_gpu_files(), {argv, argv + argc});
  }
  ::testing::InitGoogleTest(&argc, argv);
  if (cuda_available()) {
    self().environment = rank_environment_from_env();
    self().device = at::Device(
        at::kCUDA,
        static_cast<c10::DeviceIndex>(self().environment.local_rank));
    set_current_device(self().device);
    if (self().world() > 1) {
      self().store = make_tcp_store(self().environment);
    }
  } else {
    std::cout << "no GPU: NCCL is not tested\n";
  }
  return RUN_ALL_TESTS();
}

}  // namespace flatshard::testing
