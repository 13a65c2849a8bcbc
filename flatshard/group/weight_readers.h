#pragma once

#include "flatshard/buffer/peer_buffer.h"
#include "flatshard/device/stream.h"

namespace flatshard {

/// The possible readers of a group's weights: peers that copy them, and uploads
/// of main weights from host memory. Every writer waits here first.
class WeightReaders {
 public:
  /// Later work of the current stream may overwrite the weights: no peer copies
  /// them any more, and the host may write main. A backward's reductions prove
  /// that for the peers (peers_have_read); this is a fence where there was none
  /// since the last copies. Collective then. WeightWrite calls it. A program
  /// that writes weights by hand calls it as well, on all ranks, if peers read
  /// them.
  void wait();
  /// Blocks until main, in host memory, may be overwritten.
  void wait_for_uploads() const { uploaded_.synchronize(); }

  /// Marks that peers copy the contents of `weights` from here on. `weights`
  /// outlives this.
  void peers_copy(const PeerBuffer& weights) { copied_ = &weights; }
  /// Every rank's gradient needed its copies, so they are done.
  void peers_have_read() { copied_ = nullptr; }
  /// `stream` has queued a copy of main from host memory.
  void upload_queued(Stream& stream) { uploaded_.record(stream); }

 private:
  const PeerBuffer* copied_ = nullptr;  ///< and no reduction since
  Event uploaded_;
};

}  // namespace flatshard
