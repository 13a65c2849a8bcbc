// Measures what it takes to bring a layer's rows to the experts of other ranks
// and back, by collectives and by copies, at the sizes of Qwen3-30B-A3B: a line
// of JSON for each, from rank 0. Those of tokens permute them, and add up their
// rows. Copies of as many bytes alone come last. Balanced random data. One rank
// for each GPU, or those of a launcher. Without a GPU two ranks on the CPU, to
// try it.
//
// usage: flatshard_token_exchange [tokens of a rank]
#include <chrono>
#include <filesystem>
#include <utility>

#include "bench/gpu_calls.h"
#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/launch/local_ranks.h"
#include "flatshard/mesh/mesh.h"
#include "flatshard/peer/page_communicator.h"
#include "flatshard/peer/peer_communicator.h"

namespace flatshard {
namespace {

constexpr std::int64_t kExperts = 128;
constexpr std::int64_t kPerToken = 8;
constexpr std::int64_t kDim = 2048;
constexpr int kRounds = 20;

using Direction = nn::TokenExchange::Direction;
using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// Calls of one kind: the device's time of each, and the host's.
class Calls {
 public:
  explicit Calls(Mesh& mesh)
      : mesh_(mesh), timer_(make_stream_timer(mesh.device())) {}

  template <class Call>
  void run(Call&& call) {
    mesh_.world().barrier();
    timer_->start();
    const auto begin = Clock::now();
    call();
    const std::chrono::duration<double, std::micro> host = Clock::now() - begin;
    host_us_.push_back(host.count());
    timer_->stop();
    device_us_.push_back(1e3 * timer_->wait_and_take_ms());
  }

  void report(const char* kind, const char* what, double nbytes) const {
    if (mesh_.rank() != 0) {
      return;
    }
    const double us = median(device_us_);
    JsonLine line;
    line.text("exchange", kind).text("what", what).number("us", us, 1);
    line.number("host_us", median(host_us_), 1);
    if (nbytes > 0) {
      line.number("gb_per_s", 1e-3 * nbytes / us, 1);
    }
  }

 private:
  Mesh& mesh_;
  std::unique_ptr<StreamTimer> timer_;
  std::vector<double> device_us_;
  std::vector<double> host_us_;
};

void measure(
    const char* kind,
    nn::TokenExchange& exchange,
    Mesh& mesh,
    std::int64_t tokens) {
  const std::int64_t num_rows =
      tokens * kPerToken / kExperts * kExperts;  // as many for each expert
  const auto options = at::TensorOptions(mesh.device());
  const at::Tensor counts =
      at::full({kExperts}, num_rows / kExperts, options.dtype(at::kInt));
  const auto random = [&](std::int64_t count) {
    return at::randn({count, kDim}, options).to(at::kBFloat16);
  };
  const at::Tensor rows = random(num_rows);
  // What leaves this rank.
  const double nbytes =
      static_cast<double>(rows.nbytes()) * (mesh.size() - 1) / mesh.size();
  // Each token's experts are neighbours, and all of them are taken as often.
  const nn::Permutation permutation = nn::sort_by_expert(
      at::arange(num_rows, options.dtype(at::kInt))
          .remainder(kExperts)
          .view({-1, kPerToken}),
      counts);
  const at::Tensor x = random(num_rows / kPerToken);
  std::vector<Calls> calls;
  const auto parts = {
      "plan",
      "dispatch",
      "combine",
      "dispatch of tokens",
      "combine of tokens"};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    calls.emplace_back(mesh);
  }
  for (int round = 0; round < kRounds; ++round) {
    nn::ExchangePlanPtr plan;
    at::Tensor arrived;
    const auto start = [&](Direction direction,
                           const nn::TransferInput& input) {
      return exchange.start(plan, direction, input)->finish();
    };
    calls[0].run([&] { plan = exchange.plan(counts, num_rows); });
    calls[1].run(
        [&] { arrived = start(Direction::dispatch, {.rows = {rows}})[0]; });
    calls[2].run([&] { start(Direction::combine, {.rows = {arrived}}); });
    calls[3].run([&] {
      start(Direction::dispatch, {.rows = {x}, .tokens = permutation});
    });
    calls[4].run([&] {
      start(
          Direction::combine,
          {.rows = {arrived}, .tokens = permutation, .addend = x});
    });
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    calls[i].report(kind, parts.begin()[i], i == 0 ? 0 : nbytes);
  }
}

/// Copies of the rows of each expert elsewhere, in one call: within this rank's
/// memory, and from the next rank's.
void measure_copies(Mesh& mesh, std::int64_t tokens) {
  const std::int64_t run = tokens * kPerToken / kExperts * kDim * 2;
  const std::int64_t num_runs = kExperts * (mesh.size() - 1) / mesh.size();
  const auto memory = PeerMemory::create(mesh.world(), run * num_runs);
  const at::Tensor to = at::empty_like(memory->local());
  const at::Tensor next = memory->of((mesh.rank() + 1) % mesh.size());
  for (const auto& [what, from] :
       {std::pair("within a rank", memory->local()),
        std::pair("from the next rank", next)}) {
    std::vector<BytesCopy> copies;
    for (std::int64_t i = 0; i < num_runs; ++i) {
      copies.push_back(
          {.to = static_cast<char*>(to.mutable_data_ptr()) + i * run,
           .from = static_cast<const char*>(from.const_data_ptr()) + i * run,
           .nbytes = run});
    }
    Calls calls(mesh);
    // Not the default stream, which takes copies one by one.
    const auto stream = make_stream(mesh.device(), "copies");
    for (int round = 0; round < kRounds; ++round) {
      calls.run([&] {
        Event begun;
        begun.record(*current_stream(mesh.device()));
        begun.wait(*stream);
        stream->submit([&] { copy_bytes(copies, mesh.device()); });
        Event done;
        done.record(*stream);
        done.wait(*current_stream(mesh.device()));
      });
    }
    calls.report(
        "copies alone",
        what,
        static_cast<double>(run) * static_cast<double>(num_runs));
    mesh.world().barrier();
  }
}

void run(std::int64_t tokens) {
  const RankEnvironment environment = rank_environment_from_env();
  at::Device device = at::kCPU;
  if (cuda_available()) {
    device = {at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank)};
    set_current_device(device);
  }
  const auto mesh = Mesh::create(
      {{"ep", environment.world_size}},
      environment.rank,
      environment.world_size > 1 ? make_tcp_store(environment) : StoreHandle(),
      device);
  const auto group =
      mesh->communicator(0, Purpose::exchange).shared_from_this();
  CollectiveExchange collective(group, kExperts);
  measure("collective", collective, *mesh, tokens);
  PeerExchange copies(
      make_peer_communicator(group, {}),
      make_page_communicator(group),
      kExperts,
      {.window_nbytes = tokens * kPerToken * kDim * 2});
  measure("copies", copies, *mesh, tokens);
  measure_copies(*mesh, tokens);
  mesh->world().barrier();
}

// Without a call into CUDA: the ranks are forked.
int num_gpus() {
  int count = 0;
  while (std::filesystem::exists(fmt::format("/dev/nvidia{}", count))) {
    ++count;
  }
  return count;
}

}  // namespace
}  // namespace flatshard

int main(int argc, char** argv) {
  const int num_gpus = flatshard::num_gpus();
  if (!flatshard::launched_by_environment() && num_gpus != 1) {
    return flatshard::spawn_local_ranks(
        num_gpus == 0 ? 2 : num_gpus,
        {argv, argv + argc});
  }
  try {
    flatshard::run(argc > 1 ? std::atoll(argv[1]) : 8192);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
