// Random programs over NCCL, one rank per GPU, with random delays on the
// communication streams; without two GPUs it skips itself. FLATSHARD_PROGRAMS
// sets how many (120).
#include "tests/programs/found.h"
#include "tests/programs/program.h"
#include "tests/support/gpu_ranks.h"

#include "flatshard/device/stream.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

namespace flatshard {
namespace {

using nlohmann::json;
using testing::gpu_ranks;

class NcclPrograms : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available() || gpu_ranks().world() < 2) {
      GTEST_SKIP() << "fewer than two GPUs: programs over NCCL are not tested";
    }
  }

  // Each rank compares what it owns.
  bool run(const json& program) {
    const std::string key = program.at("mesh").dump();
    auto& [mesh, log] = meshes[key];
    if (!mesh) {
      log = std::make_shared<CollectiveLog>();
      mesh = gpu_ranks().mesh(
          testing::axes_of(program),
          fmt::format("programs {} {}", count++, key),
          log);
    }
    const auto result = testing::run_program(program, mesh, log);
    EXPECT_TRUE(result.problems.empty()) << fmt::format(
        "{}\nprogram: {}",
        fmt::join(result.problems, "\n"),
        program.dump());
    return result.valid;
  }

  static int count;
  std::map<
      std::string,
      std::pair<std::shared_ptr<Mesh>, std::shared_ptr<CollectiveLog>>>
      meshes;
};

int NcclPrograms::count = 0;

TEST_F(NcclPrograms, EqualTheirUnshardedTwins) {
  const char* const wanted = std::getenv("FLATSHARD_PROGRAMS");
  const int num_programs = wanted != nullptr ? std::atoi(wanted) : 120;
  int num_valid = 0;
  for (int seed = 1; seed <= num_programs && !HasFailure(); ++seed) {
    json program = testing::random_program(
        static_cast<std::uint64_t>(seed),
        gpu_ranks().world());
    program["delay_us"] = seed % 3 == 0 ? 0 : 300;
    num_valid += run(program);
  }
  std::printf("%d programs, %d of them valid\n", num_programs, num_valid);
  EXPECT_GE(num_valid, num_programs / 2);
}

TEST_F(NcclPrograms, FoundOnesStayFixed) {
  for (const testing::FoundProgram& found : testing::found_programs()) {
    const json program = json::parse(found.program);
    if (testing::world_of(program) == gpu_ranks().world()) {
      SCOPED_TRACE(found.name);
      EXPECT_TRUE(run(program));
    }
  }
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  return flatshard::testing::gpu_ranks_main(argc, argv);
}
