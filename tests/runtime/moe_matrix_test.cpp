// Each combination of degrees, strategies and options, against one rank.
#include "tests/runtime/moe_training.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

namespace flatshard::testing {
namespace {

using models::ActivationCheckpoint;

struct Balance {
  bool aux_loss;
  bool bias;
};

// Returns the mesh of (replicate,) edp and ep: without ep there is no exchange.
std::vector<int> mesh_of(bool replicates, int edp, int ep) {
  std::vector<int> mesh;
  if (replicates) {
    mesh.push_back(2);
  }
  mesh.push_back(edp);
  if (ep > 1) {
    mesh.push_back(ep);
  }
  return mesh;
}

std::vector<MoeExchange> exchanges_of(int ep) {
  if (ep == 1) {
    return {MoeExchange::none};
  }
  return {MoeExchange::collective, MoeExchange::copies};
}

const char* to_string(MoeExchange exchange) {
  switch (exchange) {
    case MoeExchange::none:
      return "";
    case MoeExchange::collective:
      return " collective";
    case MoeExchange::copies:
      return " copies";
  }
  return "";
}

// Strategies, balance, recompute and microbatches of one mesh.
void add_cases(int edp, int ep, MoeExchange exchange, std::vector<MoeRun>& to) {
  for (const char* strategy :
       {"zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp"}) {
    const bool replicates = *strategy == 'h';
    for (const Balance balance :
         {Balance{true, false}, Balance{false, true}, Balance{true, true}}) {
      for (const bool recompute : {false, true}) {
        for (const int microbatches : {1, 3}) {
          to.push_back(
              {.name = fmt::format(
                   "{} edp {} ep {}{} aux {:d} bias {:d} recompute {:d} "
                   "microbatches {}",
                   strategy,
                   edp,
                   ep,
                   to_string(exchange),
                   balance.aux_loss,
                   balance.bias,
                   recompute,
                   microbatches),
               .strategy = strategy,
               .mesh = mesh_of(replicates, edp, ep),
               .microbatches = microbatches,
               .checkpoint = recompute ? ActivationCheckpoint::full
                                       : ActivationCheckpoint::none,
               .max_norm = 0.2,
               .exchange = exchange,
               .float32 = true,
               .aux_loss = balance.aux_loss,
               .bias = balance.bias,
               .delay_seed = 3 + 16 * to.size()});
        }
      }
    }
  }
}

// The full matrix, about 8 minutes on two cores:
// --gtest_also_run_disabled_tests
// --gtest_filter='*WholeMatrix'. Prints its progress on standard output.
TEST(MoeMatrix, DISABLED_EqualsOneRankInTheWholeMatrix) {
  std::vector<MoeRun> runs;
  for (const int ep : {1, 2, 4}) {
    for (const int edp : {1, 2}) {
      for (const MoeExchange exchange : exchanges_of(ep)) {
        add_cases(edp, ep, exchange, runs);
      }
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  std::map<std::tuple<int, bool, bool>, MoeResult> references;
  double worst = 0;  // in what is allowed
  int num_bitwise = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const MoeRun& run = runs[i];
    const std::tuple key{run.sequences(), run.aux_loss, run.bias};
    if (!references.contains(key)) {
      const MoeResult want = train_moe(moe_reference(run));
      // Each norm is clipped, and biases move.
      for (const auto& [step, norm] : want.norms) {
        EXPECT_GT(norm, run.max_norm) << run.name;
      }
      EXPECT_EQ(want.biases.size(), run.bias ? 2U : 0U);
      references.emplace(key, want);
    }
    const MoeDistance distance =
        moe_distance(train_moe(run), references.at(key));
    const double tolerance = moe_tolerance(run);
    EXPECT_LE(distance.largest, tolerance)
        << run.name << ": " << distance.where;
    if (tolerance == 0) {
      ++num_bitwise;
    } else {
      worst = std::max(worst, distance.largest / tolerance);
    }
    if ((i + 1) % 24 == 0 || i + 1 == runs.size()) {
      const std::chrono::duration<double> elapsed =
          std::chrono::steady_clock::now() - begin;
      fmt::print(
          "{} of {} in {:.0f} s, {} of them bit for bit, the others within "
          "{:.2f} of the tolerance\n",
          i + 1,
          runs.size(),
          elapsed.count(),
          num_bitwise,
          worst);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace flatshard::testing
