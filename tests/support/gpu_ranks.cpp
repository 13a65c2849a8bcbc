#include "tests/support/gpu_ranks.h"

#include "flatshard/device/stream.h"
#include "flatshard/launch/local_ranks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string_view>

namespace flatshard::testing {
namespace {

GpuRanks& self() {
  static GpuRanks instance;
  return instance;
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

int num_visible_gpus() {
  int count = 0;
  while (std::filesystem::exists(fmt::format("/dev/nvidia{}", count))) {
    ++count;
  }
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const std::string_view names = visible;
    const auto num_named =
        names.empty() ? 0 : 1 + std::ranges::count(names, ',');
    count = std::min(count, static_cast<int>(num_named));
  }
  return count;
}

const GpuRanks& gpu_ranks() {
  return self();
}

int gpu_ranks_main(int argc, char** argv) {
  if (!launched_by_environment() && num_visible_gpus() > 1) {
    return spawn_local_ranks(num_visible_gpus(), {argv, argv + argc});
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
