#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "flatshard/comm/collective_signature.h"
#include "flatshard/core/error.h"

namespace flatshard {

class Communicator;

/// Observes every collective of its communicators, and may reject one or add
/// details to an error of the backend: FlightRecorder.
class CollectiveObserver {
 public:
  /// One collective of one communicator.
  struct Ticket {
    int track = -1;
    std::int64_t seq = 0;
    std::int64_t step = 0;
    bool captured = false;  ///< into a graph: it does not run yet
  };

  virtual ~CollectiveObserver() = default;

  /// @param group  names the ranks of the communicator: equal on them, on no
  ///   others.
  /// @return  the track for `begin`.
  virtual int watch(
      const std::shared_ptr<Communicator>& communicator,
      std::string group) = 0;
  /// This process's rank, as messages name it.
  virtual int rank() const = 0;

  /// Called when a collective is about to be launched.
  /// @throws Error  when none may be launched any more.
  virtual Ticket begin(int track, CollectiveSignature signature) = 0;
  /// It is on the current CUDA stream.
  virtual void launched(Ticket ticket) = 0;
  /// It has finished: the call blocked the host.
  virtual void completed(Ticket ticket) = 0;
  /// Throws when what the device computed cannot be trusted any more.
  virtual void check() const = 0;

  /// A collective threw `error`: what to throw for it, with its context.
  virtual Error explain(const Error& error) = 0;
  /// Returns the error for ranks of a group that compared their next
  /// collectives and differ by `text`. All of them throw it.
  virtual Error explain_difference(
      const std::string& text,
      const Communicator& communicator,
      std::int64_t seq,
      std::span<const IssuedCollective> issued) = 0;

 protected:
  CollectiveObserver() = default;
  CollectiveObserver(const CollectiveObserver&) = default;
  CollectiveObserver& operator=(const CollectiveObserver&) = default;
};

}  // namespace flatshard
