#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/schedule/events.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace flatshard {

/// Activations that calls of units keep for their backward, in host memory in
/// between. Carries out the Scheduler's actions on them:
///
///   compute   forward(0)  forward(1)   ...   backward(1)   backward(0)
///   download              down(0)            up(0)
///   memory                     ^ free: compute waits for the copy
///
/// The memory of a call on the device is allocated by compute. It is freed
/// after compute has waited for the copies that read or write it, so the
/// allocator may reuse it for compute's next work. A place on the host is free
/// at the same time, and each download waits for compute.
///
/// A call's place on the host is the lowest free one. Places are allocated at
/// their first use and stay, so a step like the one before uses the same ones.
class KeptActivations {
 public:
  KeptActivations(at::Device device, StreamOptions streams);
  /// Blocks the host until queued copies are done.
  ~KeptActivations();
  KeptActivations(const KeptActivations&) = delete;
  KeptActivations& operator=(const KeptActivations&) = delete;

  /// Returns whether a tensor may leave the device: dense floating-point
  /// memory of this device. Others are small, or shared by many calls.
  bool can_leave(const at::Tensor& tensor) const;
  static std::int64_t nbytes_of(const at::Tensor& tensor);

  /// Adds a tensor that can leave to what `call` keeps. Before its download.
  /// @return  its number among the tensors of the call.
  std::size_t add(CallId call, at::Tensor tensor);
  /// One more part of the call is to read what it keeps.
  void add_reader(CallId call) { ++calls_[call].num_readers; }
  /// Returns whether it was the last part.
  bool remove_reader(CallId call);
  /// Returns the tensor, or one with the same values: kernels of the current
  /// stream may read it until `release`. It was loaded if it had left.
  /// @throws Error{usage} after a reset, and when it was modified in place.
  at::Tensor tensor(CallId call, std::size_t number) const;

  // Actions -------------------------------------------------------------------

  void download(CallId call);
  /// @throws Error{usage} when a tensor was modified in place during its copy.
  void drain_download(CallId call);
  void upload(CallId call);
  void await_upload(CallId call);
  /// No effect on a call that keeps nothing.
  void release(CallId call);
  /// Drops everything. Blocks the host until queued copies are done.
  void reset() noexcept;

  /// Returns the bytes of all places on the host.
  std::int64_t host_nbytes() const;
  /// Returns the number of calls that keep something.
  std::size_t num_calls() const { return calls_.size(); }

 private:
  struct Moved {
    at::Tensor device;  ///< undefined: only in the memory of the call
    std::int64_t version = 0;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    at::ScalarType dtype = at::kFloat;
    std::int64_t begin = 0;  ///< in the place, and in the memory
    std::int64_t nbytes = 0;
  };
  struct Call {
    std::vector<Moved> tensors;
    std::int64_t nbytes = 0;  ///< with padding
    int num_readers = 0;
    int place = -1;  ///< on the host; -1: none
    Event downloaded;
    bool drained = false;
    at::Tensor memory;  ///< on the device, after an upload
    Event uploaded;
    bool awaited = false;
  };
  struct Place {
    at::Tensor memory;
    bool is_used = false;
    Event written;  ///< by the last download
    Event read;     ///< by the last upload
  };

  Call& find(CallId call);
  int take_place(std::int64_t nbytes);
  static void check_unchanged(const Moved& moved);

  at::Device device_;
  std::shared_ptr<Stream> download_;
  std::shared_ptr<Stream> upload_;
  std::map<CallId, Call> calls_;
  std::vector<Place> places_;
};

}  // namespace flatshard
