#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace flatshard::detail {

/// Makes a GPU current while it exists, as c10's CUDAGuard does. At its end,
/// CUDAGuard asks the driver for the current GPU, even if it never changed. A
/// step has thousands of these scopes.
class CudaDeviceScope {
 public:
  /// @param device  without an index: the current one.
  explicit CudaDeviceScope(at::Device device) : index_(device.index()) {
    if (index_ >= 0) {
      before_ = c10::cuda::ExchangeDevice(index_);
    }
  }
  ~CudaDeviceScope() {
    if (before_ != index_) {
      c10::cuda::MaybeSetDevice(before_);
    }
  }
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  c10::DeviceIndex index_;
  c10::DeviceIndex before_ = -1;
};

/// Makes a stream and its GPU current while it exists.
class CudaStreamScope {
 public:
  explicit CudaStreamScope(c10::cuda::CUDAStream stream)
      : device_(stream.device()),
        before_(c10::cuda::getCurrentCUDAStream(stream.device_index())) {
    c10::cuda::setCurrentCUDAStream(stream);
  }
  ~CudaStreamScope() { c10::cuda::setCurrentCUDAStream(before_); }
  CudaStreamScope(const CudaStreamScope&) = delete;
  CudaStreamScope& operator=(const CudaStreamScope&) = delete;

 private:
  CudaDeviceScope device_;
  c10::cuda::CUDAStream before_;
};

}  // namespace flatshard::detail
