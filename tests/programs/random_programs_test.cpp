// Random training programs, sharded and plain. Under ctest: some hundreds. Run
// by hand, any number, and with --shrink a failing one becomes the smallest
// program that still fails; see --help.
#include "tests/programs/found.h"
#include "tests/programs/program.h"
#include "tests/support/case_name.h"
#include "tests/support/ranks.h"

#include "flatshard/core/error.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>

namespace flatshard {
namespace {

using nlohmann::json;
using testing::axes_of;
using testing::problems_of;
using testing::ProgramResult;
using testing::random_program;
using testing::RankContext;
using testing::run_program;
using testing::run_ranks;
using testing::smaller_programs;
using testing::world_of;

struct BatchResult {
  int num_valid = 0;
  int num_run = 0;
  std::optional<json> failed;
  std::vector<std::string> problems;
};

// Runs programs of one world one after the other on the same rank threads, up
// to the first that fails.
// `announce` prints each seed first: a program that ends the process is known.
BatchResult
run_batch(int world, const std::vector<json>& programs, bool announce = false) {
  BatchResult batch;
  std::vector<ProgramResult> results(static_cast<std::size_t>(world));
  std::barrier<> together(world);
  run_ranks(world, [&](RankContext& context) {
    std::map<std::string, std::shared_ptr<Mesh>> meshes;
    for (const json& program : programs) {
      if (announce && context.rank == 0) {
        std::cout << "seed " << program.at("seed") << std::endl;
      }
      const std::string key = program.at("mesh").dump();
      if (!meshes.contains(key)) {
        meshes[key] = context.mesh(axes_of(program), "mesh " + key);
      }
      const auto rank = static_cast<std::size_t>(context.rank);
      results[rank] = run_program(program, meshes[key], context.log);
      together.arrive_and_wait();
      if (context.rank == 0) {
        ++batch.num_run;
        batch.num_valid += results[0].valid;
        batch.problems = problems_of(results);
        if (!batch.problems.empty()) {
          batch.failed = program;
        }
      }
      together.arrive_and_wait();
      if (batch.failed) {
        return;
      }
    }
  });
  return batch;
}

std::vector<json>
programs(int world, std::uint64_t first, int count, int num_models = 1) {
  std::vector<json> result;
  for (int i = 0; i < count; ++i) {
    result.push_back(random_program(
        first + static_cast<std::uint64_t>(i),
        world,
        num_models));
  }
  return result;
}

std::string text_of(const BatchResult& batch) {
  return fmt::format(
      "{}\nprogram: {}",
      fmt::join(batch.problems, "\n"),
      batch.failed ? batch.failed->dump() : "");
}

class RandomPrograms : public ::testing::TestWithParam<int> {};

TEST_P(RandomPrograms, EqualTheirUnshardedTwins) {
  constexpr int kPrograms = 280;
  const int world = GetParam();
  const BatchResult batch = run_batch(world, programs(world, 1, kPrograms));
  EXPECT_FALSE(batch.failed) << text_of(batch);
  // Plain autograd refuses some; what is left must be worth its name.
  EXPECT_GE(batch.num_valid, 150) << "too few programs say something";
  std::printf(
      "%d programs on %d ranks, %d of them valid\n",
      batch.num_run,
      world,
      batch.num_valid);
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    RandomPrograms,
    ::testing::Values(2, 3),
    [](const auto& info) { return std::to_string(info.param); });

class SeveralModels : public ::testing::TestWithParam<int> {};

TEST_P(SeveralModels, EqualTheirUnshardedTwins) {
  constexpr int kPrograms = 80;
  const BatchResult batch =
      run_batch(2, programs(2, 1, kPrograms, /*num_models=*/GetParam()));
  EXPECT_FALSE(batch.failed) << text_of(batch);
  // A loss through several models explodes more often.
  EXPECT_GE(batch.num_valid, 8) << "too few programs say something";
}

INSTANTIATE_TEST_SUITE_P(
    Models,
    SeveralModels,
    ::testing::Values(2, 3),
    [](const auto& info) { return std::to_string(info.param); });

class FoundPrograms : public ::testing::TestWithParam<testing::FoundProgram> {};

TEST_P(FoundPrograms, StaysFixed) {
  const json program = json::parse(GetParam().program);
  const BatchResult batch = run_batch(world_of(program), {program});
  EXPECT_EQ(batch.num_valid, 1) << "plain autograd refuses it";
  EXPECT_FALSE(batch.failed) << text_of(batch);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    FoundPrograms,
    ::testing::ValuesIn(testing::found_programs()),
    testing::kCaseName);

// -- by hand -----------------------------------------------------------------

constexpr const char* kHelp =
    R"(usage: random_programs_test [GoogleTest options]
       random_programs_test --programs N [--first SEED] [--world 2]
           [--models 1] [--shrink]
       random_programs_test --program FILE [--shrink]

  --programs N   run the programs of N seeds; stops at the first that fails
  --first SEED   the first seed (1)
  --world N      ranks, as threads (2)
  --models N     models in a program, on one mesh (1)
  --program FILE run one program, JSON as this command prints it; - for stdin
  --shrink       make the failing program smaller while it still fails

Exit code 0: all equal their unsharded twins; 1: one does not.
)";

// Returns how a program ends in a separate process: a crash or a hang is a
// failure.
bool fails_in_process(const std::string& self, const json& program) {
  const auto path = std::filesystem::temp_directory_path() /
                    fmt::format("program_{}.json", ::getpid());
  std::ofstream(path) << program;
  const std::string command = fmt::format(
      "timeout -k 1 30 {} --program {} >/dev/null 2>&1",
      self,
      path.string());
  const int status = std::system(command.c_str());
  std::filesystem::remove(path);
  return status != 0;
}

json shrink(const std::string& self, json program) {
  bool smaller = true;
  while (smaller) {
    smaller = false;
    for (json& candidate : smaller_programs(program)) {
      if (fails_in_process(self, candidate)) {
        program = std::move(candidate);
        std::cerr << "smaller: " << program << std::endl;
        smaller = true;
        break;
      }
    }
  }
  return program;
}

// The programs run in a separate process because they may crash or hang.
int find_and_shrink(
    const std::string& self,
    int world,
    int num_models,
    const std::vector<json>& all) {
  json failed = all[0];
  if (all.size() > 1) {
    const std::string command = fmt::format(
        "timeout -k 1 {} {} --programs {} --first {} --world {} "
        "--models {} 2>&1",
        60 + all.size(),
        self,
        all.size(),
        all[0].at("seed").get<std::uint64_t>(),
        world,
        num_models);
    FILE* const child = ::popen(command.c_str(), "r");
    std::uint64_t seed = 0;
    char line[4096];
    while (std::fgets(line, sizeof line, child) != nullptr) {
      std::cout << line;
      std::sscanf(line, "seed %lu", &seed);
    }
    if (::pclose(child) == 0) {
      return 0;
    }
    failed = random_program(seed, world, num_models);
  } else if (!fails_in_process(self, failed)) {
    std::cout << "it does not fail\n";
    return 0;
  }
  std::cout << "fails: " << failed << "\n";
  std::cout << "smallest: " << shrink(self, failed) << "\n";
  return 1;
}

int run_by_hand(const std::string& self, std::vector<std::string> arguments) {
  std::map<std::string, std::string> options;
  bool shrinks = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--shrink") {
      shrinks = true;
    } else if (i + 1 < arguments.size()) {
      options[arguments[i]] = arguments[i + 1];
      ++i;
    }
  }
  std::vector<json> all;
  int world = options.contains("--world") ? std::stoi(options["--world"]) : 2;
  const int num_models =
      options.contains("--models") ? std::stoi(options["--models"]) : 1;
  if (options.contains("--program")) {
    std::ifstream file(options["--program"]);
    all.push_back(json::parse(options["--program"] == "-" ? std::cin : file));
    world = world_of(all[0]);
  } else {
    const std::string first =
        options.contains("--first") ? options["--first"] : "1";
    all = programs(
        world,
        std::stoull(first),
        std::stoi(options["--programs"]),
        num_models);
  }
  if (shrinks) {
    return find_and_shrink(self, world, num_models, all);
  }
  const BatchResult batch = run_batch(world, all, /*announce=*/true);
  if (batch.failed) {
    std::cout << text_of(batch) << "\n";
    return 1;
  }
  std::cout << fmt::format(
      "{} programs on {} ranks, {} of them valid: all equal\n",
      all.size(),
      world,
      batch.num_valid);
  return 0;
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      std::cout << flatshard::kHelp;
      return 0;
    }
    if (argument == "--programs" || argument == "--program") {
      return flatshard::run_by_hand(argv[0], arguments);
    }
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
