#include "flatshard/device/upload.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/core/share_work.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream.h"

namespace flatshard {
namespace {

constexpr std::int64_t kPieceNbytes = kMaxFillNbytes;

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

std::int64_t nbytes_of(const TensorFill& fill) {
  const auto item = static_cast<std::int64_t>(c10::elementSize(fill.dtype));
  const std::int64_t nbytes = fill.to.numel() * item;
  FLATSHARD_CHECK(
      nbytes <= kMaxFillNbytes,
      internal,
      "expected at most {} bytes to read at once, got {}",
      kMaxFillNbytes,
      nbytes);
  return nbytes;
}

void fill_on_host(const TensorFill& fill, std::vector<std::byte>& buffer) {
  const at::NoGradGuard no_grad;
  const auto nbytes = static_cast<std::size_t>(nbytes_of(fill));
  if (fill.to.scalar_type() == fill.dtype) {
    fill.read({static_cast<std::byte*>(fill.to.data_ptr()), nbytes});
    return;
  }
  buffer.resize(kMaxFillNbytes);
  fill.read(std::span(buffer).first(nbytes));
  fill.to.copy_(at::from_blob(
      buffer.data(),
      {fill.to.numel()},
      at::TensorOptions(fill.dtype)));
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
    run(
        [&](std::byte* pinned) {
          std::memcpy(
              pinned,
              piece.from,
              static_cast<std::size_t>(piece.nbytes));
        },
        [&](const std::byte* pinned) {
          copy_bytes(piece.to, pinned, piece.nbytes, stream_->device());
        });
  }

  /// @param staging  [kPieceNbytes] uint8 on the device, used only by this
  /// pair.
  void fill(const TensorFill& fill, const at::Tensor& staging) {
    const std::int64_t nbytes = nbytes_of(fill);
    run(
        [&](std::byte* pinned) {
          fill.read({pinned, static_cast<std::size_t>(nbytes)});
        },
        [&](const std::byte* pinned) {
          if (fill.to.scalar_type() == fill.dtype) {
            copy_bytes(fill.to.data_ptr(), pinned, nbytes, stream_->device());
            return;
          }
          copy_bytes(staging.data_ptr(), pinned, nbytes, stream_->device());
          fill.to.copy_(staging.narrow(0, 0, nbytes).view(fill.dtype));
        });
  }

 private:
  /// Calls write(pinned) here, and queue(pinned) on the stream.
  template <class Write, class Queue>
  void run(const Write& write, const Queue& queue) {
    std::swap(buffers_[0], buffers_[1]);
    Buffer& buffer = buffers_[0];
    buffer.copied.synchronize();
    auto* const pinned = static_cast<std::byte*>(buffer.memory.data_ptr());
    write(pinned);
    stream_->submit([&] { queue(pinned); });
    buffer.copied.record(*stream_);
  }

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

void fill_tensors(
    std::span<const TensorFill> fills,
    at::Device device,
    int num_threads) {
  if (!device.is_cuda()) {
    share_work(fills.size(), num_threads, [&] {
      return [&, buffer = std::vector<std::byte>()](std::size_t i) mutable {
        fill_on_host(fills[i], buffer);
      };
    });
    return;
  }
  if (fills.empty()) {
    return;
  }
  // Allocated here: memory of the threads' streams would stay reserved for
  // them. Their work has ended when it is freed.
  const at::Tensor staging = at::empty(
      {std::max(1, num_threads), kPieceNbytes},
      at::TensorOptions(at::kByte).device(device));
  std::atomic<std::int64_t> next = 0;
  Event begin;
  begin.record(*current_stream(device));
  share_work(fills.size(), num_threads, [&] {
    return
        [&,
         pair = std::make_unique<PinnedPair>(device, begin),
         own = staging[next++]](std::size_t i) { pair->fill(fills[i], own); };
  });
}

int num_upload_threads(int num_ranks) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores / num_ranks, 2, 16);
}

}  // namespace flatshard
