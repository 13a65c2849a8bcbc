#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace flatshard {

/// A number that streams write and the host reads: the progress of work, also
/// of work in a graph, because the host cannot query its events. Starts at 0.
class StreamWord {
 public:
  virtual ~StreamWord() = default;
  /// Queued on the current stream, after earlier work; into a graph where that
  /// records. CPU: done on return.
  /// @throws Error{cuda} when the driver reports an error.
  virtual void write(std::uint32_t value) = 0;
  /// Returns the value that the device has written by now; does not wait.
  virtual std::uint32_t read() const = 0;
};

/// While nothing is recorded.
std::unique_ptr<StreamWord> make_stream_word(at::Device device);

/// Returns whether the current stream of `device` records a graph. Never on a
/// CPU.
bool current_stream_records(at::Device device);

}  // namespace flatshard
