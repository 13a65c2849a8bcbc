// Stands in for cuda_*.cpp in a build without CUDA.
#include "flatshard/core/error.h"
#include "flatshard/device/device_backend.h"
#include "flatshard/device/device_name.h"

namespace flatshard {
namespace {

[[noreturn]] void throw_no_cuda(const char* what) {
  FLATSHARD_THROW(
      config,
      "{}: this build has no CUDA (FLATSHARD_CUDA=off, or no nvcc of torch's "
      "major version was found); use device cpu or build with "
      "-DFLATSHARD_CUDA=on",
      what);
}

}  // namespace

bool cuda_available() {
  return false;
}

int num_cuda_devices() {
  return 0;
}

std::string cuda_device_name(at::Device /*device*/) {
  throw_no_cuda("CUDA device name");
}

namespace detail {

std::shared_ptr<Stream> make_cuda_stream(
    at::Device /*device*/,
    std::string /*name*/,
    StreamOptions /*options*/) {
  throw_no_cuda("CUDA stream");
}

std::shared_ptr<Stream> current_cuda_stream(at::Device /*device*/) {
  throw_no_cuda("CUDA stream");
}

int cuda_compute_capability(at::Device /*device*/) {
  throw_no_cuda("CUDA device");
}

void set_current_cuda_device(at::Device /*device*/) {
  throw_no_cuda("CUDA device");
}

MemoryStats cuda_memory_stats(at::Device /*device*/) {
  throw_no_cuda("CUDA memory statistics");
}

void copy_cuda_bytes(
    void* /*to*/,
    const void* /*from*/,
    std::size_t /*nbytes*/,
    at::Device /*device*/) {
  throw_no_cuda("CUDA copy");
}

void copy_cuda_bytes(
    std::span<const BytesCopy> /*copies*/,
    at::Device /*device*/) {
  throw_no_cuda("CUDA copies");
}

void count_cuda_memory_outside(at::Device /*device*/, std::int64_t /*nbytes*/) {
  throw_no_cuda("CUDA memory statistics");
}

bool pin_host_memory(void* /*begin*/, std::size_t /*nbytes*/) {
  throw_no_cuda("pinned memory");
}

void unpin_host_memory(void* /*begin*/) noexcept {
}

std::unique_ptr<StreamTimer> make_cuda_timer(at::Device /*device*/) {
  throw_no_cuda("CUDA timer");
}

std::shared_ptr<GraphPool> make_cuda_graph_pool(
    at::Device /*device*/,
    bool /*audited*/) {
  throw_no_cuda("CUDA graph");
}

std::unique_ptr<StreamWord> make_cuda_stream_word(at::Device /*device*/) {
  throw_no_cuda("CUDA stream");
}

bool current_cuda_stream_records(at::Device /*device*/) {
  return false;
}

}  // namespace detail
}  // namespace flatshard
