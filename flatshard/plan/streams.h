#pragma once

#include "flatshard/plan/gpu.h"
#include "flatshard/schedule/events.h"

#include <string>
#include <vector>

namespace flatshard::plan {

/// The queues of a rank's device, as the runtime has them.
enum class Stream {
  compute,
  gather,
  reduce,
  outer,
  exchange,
  tensor,
  upload,
  download,
  optimizer  ///< updates in parallel with the next forward
};
inline constexpr int kNumStreams = 9;
std::string_view to_string(Stream stream);

/// The link that carries an operation's bytes. Operations that share one at the
/// same time share its rate, except for tensor parallelism inside a host and
/// others over the network.
enum class Link {
  none,         ///< kernels; they share the GPU with each other
  collectives,  ///< NCCL; uses SMs as well
  copies,       ///< copy engines
  from_host,    ///< copy engines, and the GPU's link to its host
  to_host,      ///< likewise; both ways at once have their full rates
};
inline constexpr int kNumLinks = 5;

/// One operation of a stream. Operations of a stream run in their order.
struct Operation {
  Stream stream = Stream::compute;
  Link link = Link::none;
  bool leaves_host = false;  ///< a transfer over the network
  double seconds = 0;        ///< without contention
  /// Seconds of a transfer while compute runs; 0: unchanged.
  double beside_compute = 0;
  std::vector<int> waits;  ///< operations that have to end before
  std::string what;        ///< e.g. "forward", "all-gather"
  UnitId unit = kNoUnit;
  int microbatch = -1;
};

/// When an operation runs, in seconds.
struct Span {
  double begin = 0;
  double end = 0;

  bool operator==(const Span&) const = default;
};

/// Runs operations on streams that never wait for their host: one starts when
/// its stream is free and its waits have ended. Kernels of several streams
/// share the GPU evenly, as if they ran one after the other. Compute and
/// transfers are slower while both run, and transfers over one link share it.
/// @param contention  used for compute. For transfers, see
///   Operation::beside_compute.
///
/// @return  by operation.
/// @throws Error{internal} when operations wait for each other.
std::vector<Span> run_streams(
    const std::vector<Operation>& operations,
    const Contention& contention);

}  // namespace flatshard::plan
