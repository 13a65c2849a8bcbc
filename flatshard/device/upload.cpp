#include "flatshard/device/upload.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "flatshard/core/share_work.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream.h"

namespace flatshard {
namespace {

constexpr std::int64_t kPieceNbytes = 8 << 20;

std::vector<BytesCopy> pieces_of(std::span<const BytesCopy> copies) {
  std::vector<BytesCopy> pieces;
  for (const BytesCopy& copy : copies) {
    for (std::int64_t done = 0; done < copy.nbytes; done += kPieceNbytes) {
      pieces.push_back(
          {static_cast<std::byte*>(copy.to) + done,
           static_cast<const std::byte*>(copy.from) + done,
           std::min(kPieceNbytes, copy.nbytes - done)});
    }
  }
  return pieces;
}

/// The two buffers of one thread: it fills one while the other is copied.
class PinnedPair {
 public:
  PinnedPair(at::Device device, const Event& begin)
      : stream_(make_stream(device, "upload")) {
    set_current_device(device);
    for (Buffer& buffer : buffers_) {
      buffer.memory = host_buffer(kPieceNbytes, device);
    }
    begin.wait(*stream_);
  }

  ~PinnedPair() {
    stream_->reset();
  }  // the buffers go only when all copies
     // have arrived
  PinnedPair(const PinnedPair&) = delete;
  PinnedPair& operator=(const PinnedPair&) = delete;

  void copy(const BytesCopy& piece) {
    std::swap(buffers_[0], buffers_[1]);
    Buffer& buffer = buffers_[0];
    buffer.copied.synchronize();
    void* const pinned = buffer.memory.data_ptr();
    std::memcpy(pinned, piece.from, static_cast<std::size_t>(piece.nbytes));
    stream_->submit(
        [&] { copy_bytes(piece.to, pinned, piece.nbytes, stream_->device()); });
    buffer.copied.record(*stream_);
  }

 private:
  struct Buffer {
    at::Tensor memory;
    Event copied;
  };
  std::shared_ptr<Stream> stream_;
  std::array<Buffer, 2> buffers_;
};

}  // namespace

void upload(
    std::span<const BytesCopy> copies,
    at::Device device,
    int num_threads) {
  const std::vector<BytesCopy> pieces = pieces_of(copies);
  if (!device.is_cuda()) {
    share_work(pieces.size(), num_threads, [&] {
      return [&](std::size_t i) {
        const BytesCopy& piece = pieces[i];
        copy_bytes(piece.to, piece.from, piece.nbytes, device);
      };
    });
    return;
  }
  Event begin;
  begin.record(*current_stream(device));
  share_work(pieces.size(), num_threads, [&] {
    return [&, pair = std::make_unique<PinnedPair>(device, begin)](
               std::size_t i) { pair->copy(pieces[i]); };
  });
}

}  // namespace flatshard
