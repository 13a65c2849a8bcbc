// Measures what the watcher costs a collective: two ranks as threads over Gloo.
// usage: flatshard_watcher_cost [collectives]
#include <ATen/Functions.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "flatshard/comm/collective_scope.h"
#include "flatshard/comm/make_communicator.h"
#include "flatshard/mesh/mesh.h"

namespace flatshard {
namespace {

// Calls rank_main(0) here, and rank_main(1) in another thread. Returns the
// result of rank 0.
template <class RankMain>
double on_two_ranks(RankMain&& rank_main) {
  std::thread other(rank_main, 1);
  const double found = rank_main(0);
  other.join();
  return found;
}

// Returns what one of `count` calls takes, in units of `Unit`.
template <class Unit, class Call>
double time_of(int count, Call&& call) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    call();
  }
  const std::chrono::duration<double, Unit> time =
      std::chrono::steady_clock::now() - begin;
  return time.count() / count;
}

double us_per_all_gather(int count, bool watcher, bool compare) {
  const StoreHandle store = make_local_store();
  return on_two_ranks([&](int rank) {
    MeshOptions options;
    options.watcher = watcher;
    options.communicator.compare_collectives = compare;
    const auto mesh = Mesh::create({{"dp", 2}}, rank, store, at::kCPU, options);
    auto& group = mesh->communicator(0, Purpose::gather);
    const at::Tensor in = at::ones({4096});
    const at::Tensor out = at::empty({8192});
    const CollectiveScope scope(1, "model.layers.0");
    const auto all_gather = [&] { group.all_gather(out, in); };
    time_of<std::micro>(count / 10, all_gather);
    return time_of<std::micro>(count, all_gather);
  });
}

// The recorder alone, on the calling thread.
double ns_per_entry(int count) {
  const StoreHandle store = make_local_store();
  return on_two_ranks([&](int rank) {
    const auto flight =
        std::make_shared<FlightRecorder>(rank, 2, store, at::kCPU);
    const auto group = make_self_communicator("dp.gather", at::kCPU);
    const int track = flight->watch(group, "group");
    return time_of<std::nano>(rank == 0 ? count : 0, [&] {
      flight->completed(flight->begin(
          track,
          {.kind = CollectiveKind::all_gather,
           .numel = 4096,
           .dtype = at::kFloat,
           .unit = "model.layers.0"}));
    });
  });
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  using namespace flatshard;
  const int count = argc > 1 ? std::atoi(argv[1]) : 5000;
  fmt::print("one entry in the ring: {:.0f} ns\n", ns_per_entry(100 * count));
  for (const auto& [watcher, compare] :
       {std::pair{false, false}, {true, false}, {true, true}}) {
    fmt::print(
        "all-gather of 4096 floats per rank, watcher {}, comparison {}: "
        "{:.0f} us\n",
        watcher ? "on" : "off",
        compare ? "on" : "off",
        us_per_all_gather(count, watcher, compare));
  }
}
