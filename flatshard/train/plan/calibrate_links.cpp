// Measures transfers between ranks.
#include "flatshard/comm/all_gather_values.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"
#include "flatshard/peer/peer_communicator.h"
#include "flatshard/peer/peer_memory.h"
#include "flatshard/runtime/copy_engines_choice.h"
#include "flatshard/train/plan/calibrate.h"
#include "flatshard/train/plan/call_timer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <utility>

namespace flatshard {
namespace {

constexpr double kLinkGiga = 1e9;
constexpr int kRounds = 5;
constexpr int kProducts = 20;
constexpr std::int64_t kLeastNbytes = std::int64_t{1} << 20;

at::Tensor floats(at::Device device, std::int64_t nbytes) {
  return at::zeros(
      {nbytes / 2},
      at::TensorOptions(device).dtype(at::kBFloat16));
}

/// Returns the median over rounds that all ranks start together.
template <class Call>
double seconds_together(Mesh& mesh, Call&& call) {
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    mesh.world().barrier();
    seconds.push_back(seconds_in_a_row(mesh.device(), 3, call));
  }
  std::ranges::sort(seconds);
  return seconds[kRounds / 2];
}

/// Returns the bytes that a rank receives of a full buffer.
double received(const Mesh& mesh, std::int64_t nbytes) {
  return static_cast<double>(nbytes) * (mesh.size() - 1) / mesh.size();
}

/// Slowdown of matmuls and transfers while both run.
struct Slowdown {
  double products = 1;
  double transfers = 1;
};

/// Runs `transfers` transfers in parallel with `products` matmuls. The smaller
/// group ends first, so that all its time overlaps the other.
/// @return  the seconds of a matmul and of a transfer.
template <class Transfer>
std::pair<double, double> run_together(
    Mesh& mesh,
    std::int64_t transfers,
    const Transfer& transfer,
    int products,
    const std::function<void()>& product) {
  const at::Device device = mesh.device();
  const auto stream = make_stream(device, "transfers", {.high_priority = true});
  const auto timer = make_stream_timer(device);
  mesh.world().barrier();
  Event queued;
  queued.record(*current_stream(device));
  queued.wait(*stream);
  Communicator* const world = &mesh.world();
  queue_collectives(*stream, {&world, 1}, [&] {
    timer->start();
    for (std::int64_t i = 0; i < transfers; ++i) {
      transfer();
    }
    timer->stop();
  });
  const double of_product = seconds_in_a_row(device, products, product);
  stream->synchronize();
  mesh.world().barrier();
  return {
      of_product,
      1e-3 * timer->wait_and_take_ms() / static_cast<double>(transfers)};
}

template <class Transfer>
Slowdown contention(
    Mesh& mesh,
    const CalibrateOptions& options,
    const Transfer& transfer) {
  const at::Device device = mesh.device();
  const std::int64_t size = options.products.back() / 2;
  const auto like = at::TensorOptions(device).dtype(at::kBFloat16);
  const at::Tensor a = at::randn({size / 2, size}, like);
  const at::Tensor b = at::randn({size, size}, like);
  at::Tensor out = at::empty({size / 2, size}, like);
  const auto product = [&] { at::mm_out(out, a, b); };
  const double one = seconds_in_a_row(device, kProducts, product);
  const double alone = seconds_together(mesh, transfer);
  // The number is the same on every rank.
  const double per_product = std::ranges::max(
      all_gather_values(mesh.world(), std::max(alone, 1e-7) / one));
  const auto many = static_cast<std::int64_t>(2 + 3 * kProducts / per_product);
  const double beside =
      run_together(mesh, many, transfer, kProducts, product).first;
  constexpr std::int64_t kTransfers = 4;
  const int products =
      std::min(1000, static_cast<int>(2 + 3 * kTransfers * per_product));
  const double slowed =
      run_together(mesh, kTransfers, transfer, products, product).second;
  return {
      .products = std::max(1.0, beside / one),
      .transfers = std::max(1.0, slowed / alone)};
}

}  // namespace

void calibrate_host_copies(
    Mesh& mesh,
    const CalibrateOptions& options,
    plan::Gpu& gpu) {
  const at::Device device = mesh.device();
  const std::int64_t nbytes = options.link_nbytes / 4;
  struct Way {
    std::shared_ptr<Stream> stream;
    at::Tensor from;
    at::Tensor to;
  };
  const auto on_device = [&] {
    return at::zeros({nbytes}, at::TensorOptions(device).dtype(at::kByte));
  };
  std::array<Way, 2> ways{
      Way{make_stream(device, "upload"),
          host_buffer(nbytes, device),
          on_device()},
      Way{make_stream(device, "download"),
          on_device(),
          host_buffer(nbytes, device)}};
  const auto copy_both_ways = [&] {
    const auto current = current_stream(device);
    for (Way& way : ways) {
      Event begin;
      begin.record(*current);
      begin.wait(*way.stream);
      way.stream->submit([&] {
        copy_bytes(
            way.to.mutable_data_ptr(),
            way.from.const_data_ptr(),
            nbytes,
            device);
      });
    }
    for (Way& way : ways) {
      Event end;
      end.record(*way.stream);
      end.wait(*current);
    }
  };
  gpu.host_gb_s = static_cast<double>(nbytes) /
                  seconds_together(mesh, copy_both_ways) / kLinkGiga;
}

void calibrate_links(
    Mesh& mesh,
    const CalibrateOptions& options,
    plan::Gpu& gpu) {
  const at::Device device = mesh.device();
  Communicator& world = mesh.world();
  const int ranks = mesh.size();
  const std::int64_t most = options.link_nbytes / ranks * ranks;
  const at::Tensor whole = floats(device, most);
  const at::Tensor other = floats(device, most);
  const at::Tensor shard = floats(device, most / ranks);
  // Without peer access between the GPUs, these copies are not used.
  const bool copies = device.is_cpu() || PeerMemory::has_fast_links(world);
  const auto memory =
      copies ? PeerMemory::create(world, most / ranks) : nullptr;
  const auto by_copies =
      copies ? make_peer_communicator(
                   world.shared_from_this(),
                   {.reductions_nbytes = CopyEngines::kReductionsNbytes})
             : nullptr;
  const auto copy_from_peers = [&](std::int64_t nbytes) {
    for (int i = 1; i < ranks; ++i) {
      const int peer = (mesh.rank() + i) % ranks;
      copy_bytes(
          static_cast<char*>(whole.mutable_data_ptr()) + peer * nbytes,
          memory->of(peer).const_data_ptr(),
          nbytes,
          device);
    }
  };
  plan::LinkRates& links = gpu.nvlink;
  for (std::int64_t nbytes = kLeastNbytes; nbytes <= most; nbytes *= 8) {
    const std::int64_t part = nbytes / 2 / ranks;  // elements
    const at::Tensor all = whole.narrow(0, 0, part * ranks);
    const at::Tensor in = shard.narrow(0, 0, part);
    const auto add = [&](plan::Curve& curve, double moved, auto&& call) {
      curve.sizes.push_back(static_cast<double>(nbytes));
      curve.rates.push_back(moved / seconds_together(mesh, call) / kLinkGiga);
    };
    add(links.all_gather, received(mesh, nbytes), [&] {
      world.all_gather(all, in);
    });
    add(links.reduce_scatter, received(mesh, nbytes), [&] {
      world.reduce_scatter(in, all, ReduceOp::sum);
    });
    add(links.all_reduce, 2 * received(mesh, nbytes), [&] {
      world.all_reduce(all, ReduceOp::sum);
    });
    std::vector<RowsOfPeer> parts;
    for (int peer = 0; peer < ranks; ++peer) {
      parts.push_back({.peer = peer, .begin = peer * part, .rows = part});
    }
    add(links.all_to_all, received(mesh, nbytes), [&] {
      world.all_to_all(all, other.narrow(0, 0, part * ranks), parts, parts);
    });
    if (copies) {
      add(links.copies, received(mesh, nbytes), [&] {
        copy_from_peers(part * 2);
      });
      add(links.copied_reductions, received(mesh, nbytes), [&] {
        by_copies->reduce_scatter(in, all, ReduceOp::sum);
      });
    }
  }
  const Slowdown by_collectives =
      contention(mesh, options, [&] { world.all_gather(whole, shard); });
  const Slowdown by_engines =
      copies ? contention(mesh, options, [&] { copy_from_peers(most / ranks); })
             : by_collectives;
  gpu.contention = {
      .collectives = by_collectives.products,
      .copies = by_engines.products,
      .slowed_collectives = by_collectives.transfers,
      .slowed_copies = by_engines.transfers};
  if (!copies) {
    links.copies = links.all_gather;
    links.copied_reductions = links.reduce_scatter;
  }
}

}  // namespace flatshard
