#pragma once

#include "flatshard/core/log.h"
#include "flatshard/device/stream.h"

#include <exception>
#include <memory>
#include <utility>

namespace flatshard {

/// A stream's use of tensors. Compute may reuse their memory after it. The
/// destructor waits if no caller did. Declare it after the tensors.
class StreamUse {
 public:
  StreamUse() = default;
  ~StreamUse() {
    if (!stream_) {
      return;
    }
    try {
      until_now(stream_);
      wait();
    } catch (const std::exception& error) {
      log_debug(
          "a transfer failed, and its result was not used: {}",
          error.what());
    }
  }
  StreamUse(const StreamUse&) = delete;
  StreamUse& operator=(const StreamUse&) = delete;

  /// It ends after what `stream` has queued.
  void until_now(std::shared_ptr<Stream> stream) {
    stream_ = std::move(stream);
    end_.record(*stream_);
  }
  /// Makes the current stream wait for the end.
  void wait() {
    end_.wait(*current_stream(stream_->device()));
    stream_.reset();
  }

 private:
  std::shared_ptr<Stream> stream_;  ///< null: not in use
  Event end_;
};

}  // namespace flatshard
