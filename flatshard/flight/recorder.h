#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flatshard/comm/collective_observer.h"
#include "flatshard/comm/store.h"
#include "flatshard/flight/captured.h"
#include "flatshard/flight/diagnosis.h"

namespace flatshard {

/// Called once, from a thread of the watcher, when there is a verdict but the
/// communicators have not ended some ten seconds after it. NCCL's abort waits
/// for the connections of all ranks of the host, also of one that is stopped.
/// The work that this process waits for on the GPU may then never end: a
/// program can report the verdict and end its process here. The library does
/// not. Source: ncclProxyService in NCCL's src/proxy.cc.
using OnStuckAbort = std::function<void(const Verdict&)>;

struct FlightRecorderOptions {
  /// A rank that is silent, or late for a collective, for this long is named
  /// and the communicators are aborted.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Timeout for ranks to wait for each other at creation.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);
  /// Collectives that each communicator remembers.
  int capacity = 1024;
  /// Key prefix in the store.
  std::string name = "mesh";
  /// torchrun's agent serves the store, not rank 0.
  bool launcher_serves_store = false;
  /// Unset: a warning is logged.
  OnStuckAbort on_stuck_abort;
};

/// Records this rank's collectives, with a watcher that compares them with the
/// other ranks'.
///
/// Every collective of a mesh is one entry in a ring: communicator, sequence,
/// step, unit, kind, elements, dtype, and whether it is scheduled, started or
/// completed. A thread publishes the newest entries and a heartbeat through the
/// store, every timeout / 20 and at most once a second. Rank 0 compares the
/// ranks; when it is missing, every other rank does.
///
/// A rank that is missing, differs or is late for longer than the timeout is
/// named by a verdict. All ranks read it, with every rank's state. The watcher
/// then aborts the communicators. A thread that waits in a collective, or calls
/// the next one, gets the verdict as an Error. Nothing ends the process. An
/// abort that hangs does not block the process: see OnStuckAbort.
///
/// Thread-safe. Construction and destruction are collective: rank 0 stays until
/// the others have left or have seen that it leaves, two seconds at most.
class FlightRecorder : public CollectiveObserver {
 public:
  FlightRecorder(
      int rank,
      int world,
      StoreHandle store,
      at::Device device,
      FlightRecorderOptions options = {});
  ~FlightRecorder() override;
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// Step of collectives outside a CollectiveScope that sets a step.
  void set_step(std::int64_t step);

  /// Reports to the other ranks at once that this one leaves with an exception.
  /// Blocks until it is published, a few seconds at most. An error of CUDA or
  /// NCCL may be the echo of another rank's end: the ranks are compared first.
  /// @throws the verdict for such an error.
  void publish_failure(const std::string& message);

  // Graphs with collectives: a collective launched while the current stream
  // records belongs to the graph, and each replay launches it.

  /// Called before the recording.
  std::shared_ptr<CapturedCollectives> make_captured();
  /// First in the recording, on the stream that everything in it follows.
  void begin_capture(const std::shared_ptr<CapturedCollectives>& captured);
  /// Last in it; or, `failed`, at any time.
  void end_capture(bool failed);
  /// The graph was launched on the current stream.
  void replayed(
      const std::shared_ptr<CapturedCollectives>& captured,
      std::int64_t step);
  /// Called once a verdict exists, in parallel with the communicators' aborts,
  /// from a separate thread, for as long as the returned handle exists. NCCL's
  /// abort waits until all graphs with its collectives are gone.
  using WithAbort = std::shared_ptr<std::function<void()>>;
  [[nodiscard]] WithAbort with_abort(std::function<void()> action);

  std::optional<Verdict> verdict() const;
  /// This rank's own state, with all entries.
  FlightState state() const;
  std::chrono::milliseconds timeout() const;

  // CollectiveObserver -------------------------------------------------------

  /// `communicator` is aborted with the others.
  int watch(
      const std::shared_ptr<Communicator>& communicator,
      std::string group) override;
  int rank() const override;
  /// @throws the verdict when there is one.
  Ticket begin(int track, CollectiveSignature signature) override;
  void launched(Ticket ticket) override;
  void completed(Ticket ticket) override;
  /// Throws the verdict if there is one. A host that waited for the device
  /// calls it before it trusts the data that it reads.
  void check() const override;
  /// Waits for the verdict and returns that; without one in time, `error`.
  Error explain(const Error& error) override;
  /// Returns the verdict of all ranks. Blocks like publish_failure.
  Error explain_difference(
      const std::string& text,
      const Communicator& communicator,
      std::int64_t seq,
      std::span<const IssuedCollective> issued) override;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with its threads
};

}  // namespace flatshard
