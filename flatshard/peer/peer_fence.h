#pragma once

namespace flatshard {

/// A fence between the ranks' GPU streams without a kernel: each rank's stream
/// writes a count for its peers, and waits until the peers' counts have reached
/// the same value. That costs the host one call of the driver. The counts are
/// in host memory that the processes share.
///
/// Fences of one rank are ordered, no matter which streams they are in.
class PeerFence {
 public:
  virtual ~PeerFence() = default;
  PeerFence(const PeerFence&) = delete;
  PeerFence& operator=(const PeerFence&) = delete;

  /// See Communicator::fence. In the current stream; does not block the host.
  /// @throws Error{comm} after release().
  virtual void fence() = 0;
  /// Streams of this rank permanently stop waiting for peers. From any thread,
  /// also while the device waits.
  virtual void release() = 0;

 protected:
  PeerFence() = default;
};

}  // namespace flatshard
