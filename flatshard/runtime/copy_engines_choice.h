#pragma once

#include <cstdint>

namespace flatshard {

/// Which transfers are copies between the memory of the ranks instead of
/// collectives. On GPUs copy engines make them, and leave the SMs to what
/// computes. All ranks of each group on one host.
///
/// An all-gather by copies involves no peer, so only a later collective proves
/// to a rank that its weights were read: a backward's reductions do, and where
/// there were none (after an evaluation) WeightReaders::wait. Optimizers and
/// checkpoints call it before they write. Every other writer of weights does,
/// too.
struct CopyEngines {
  enum class Gathers { none, forward, all };
  /// Not with ParamGroupOptions::keep_compute_weights = false.
  Gathers gathers = Gathers::none;
  /// Reduce-scatters use a buffer of about this many bytes on each rank, for
  /// each group of ranks that has any; 0: they are collectives.
  std::int64_t reductions_nbytes = 0;

  /// On eight GPUs, pieces between each pair of ranks are 16 MiB.
  static constexpr std::int64_t kReductionsNbytes = std::int64_t{256} << 20;
  static constexpr CopyEngines all() {
    return {Gathers::all, kReductionsNbytes};
  }

  bool gather() const { return gathers != Gathers::none; }
  bool any() const { return gather() || reductions_nbytes > 0; }

  bool operator==(const CopyEngines&) const = default;
};

}  // namespace flatshard
