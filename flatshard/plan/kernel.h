#pragma once

#include "flatshard/plan/gpu.h"
#include "flatshard/plan/links.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::plan {

/// Work of the compute stream that a Gpu has a price for: a matmul, the grouped
/// matmul of a layer's experts, a matmul with a factor of an adapter,
/// attention, or a pass over memory. Or the place among such work at which the
/// ranks of tensor or context parallelism exchange activations.
struct Kernel {
  enum class Kind {
    product,
    grouped,
    low_rank,  ///< as long as a pass over its inputs and outputs
    attention,
    pass,
    transfer,  ///< later kernels wait for it, unless `overlaps`
    finish,    ///< later kernels wait for the oldest overlapping transfer
  };

  Kind kind = Kind::pass;
  Product product = Product::forward;
  double groups = 1;  ///< experts
  double m = 0, n = 0, k = 0;
  std::string recipe;  ///< for an FP8 matmul; empty: bfloat16
  bool backward = false;
  double sequences = 0, heads = 0, seq_len = 0;
  double slowdown = 1;  ///< of attention: its time over the Gpu's
  std::int64_t head_dim = 0;
  std::string_view pass;  ///< one of kPasses
  double nbytes = 0;      ///< read and written; of a transfer, the full buffer,
                          ///< and of an all-to-all what a rank has
  Transfer transfer = Transfer::all_gather;
  bool overlaps = false;       ///< a transfer that runs until a `finish`
  bool is_over_hosts = false;  ///< a transfer between Job::context_hosts
  bool is_kept = false;  ///< a recompute of its layer does not run it again
  double runs = 1;       ///< launches of these sizes, one after the other

  bool operator==(const Kernel&) const = default;

  static Kernel matmul(
      Product product,
      double m,
      double n,
      double k,
      std::string recipe = {}) {
    Kernel kernel{.kind = Kind::product, .product = product};
    kernel.m = m;
    kernel.n = n;
    kernel.k = k;
    kernel.recipe = std::move(recipe);
    return kernel;
  }
  /// @param m  rows of each expert.
  static Kernel
  experts(Product product, double groups, double m, double n, double k) {
    Kernel kernel = matmul(product, m, n, k);
    kernel.kind = Kind::grouped;
    kernel.groups = groups;
    return kernel;
  }
  /// @param nbytes  read and written.
  static Kernel low_rank(double m, double n, double k, double nbytes) {
    Kernel kernel = matmul(Product::forward, m, n, k);
    kernel.kind = Kind::low_rank;
    kernel.nbytes = nbytes;
    return kernel;
  }
  static Kernel attention(
      bool backward,
      double sequences,
      double heads,
      double seq_len,
      std::int64_t head_dim) {
    Kernel kernel{.kind = Kind::attention};
    kernel.backward = backward;
    kernel.sequences = sequences;
    kernel.heads = heads;
    kernel.seq_len = seq_len;
    kernel.head_dim = head_dim;
    return kernel;
  }
  static Kernel memory(std::string_view pass, double nbytes) {
    Kernel kernel{.kind = Kind::pass};
    kernel.pass = pass;
    kernel.nbytes = nbytes;
    return kernel;
  }

  static Kernel
  exchange(Transfer transfer, double nbytes, bool overlaps = false) {
    Kernel kernel{.kind = Kind::transfer};
    kernel.transfer = transfer;
    kernel.nbytes = nbytes;
    kernel.overlaps = overlaps;
    return kernel;
  }
  static Kernel over_hosts(Transfer transfer, double nbytes) {
    Kernel kernel = exchange(transfer, nbytes);
    kernel.is_over_hosts = true;
    return kernel;
  }
  static Kernel finish() { return {.kind = Kind::finish}; }

  /// Returns the same work as `num` launches, each of as many tokens. In a
  /// matmul, tokens are rows, or for a weight's gradient what it sums over.
  Kernel in_runs(double num) const;

  bool is_exchange() const {
    return kind == Kind::transfer || kind == Kind::finish;
  }

  /// Returns the seconds of compute: 0 for transfers (see Job for their ranks).
  double seconds(const Gpu& gpu) const { return runs * run_seconds(gpu); }
  /// FLOPs of matmuls and attention; 0 for passes and transfers.
  double flops() const;
  /// Returns its class in a summary: GEMM, attention, or the pass.
  std::string_view label() const;

 private:
  double run_seconds(const Gpu& gpu) const;
};

using Kernels = std::vector<Kernel>;

Kernels in_runs(Kernels kernels, double num);

double seconds(const Gpu& gpu, const Kernels& kernels);
double flops(const Kernels& kernels);

}  // namespace flatshard::plan
