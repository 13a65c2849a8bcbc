#pragma once

#include "flatshard/device/graph.h"
#include "flatshard/device/memory.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/stream_word.h"
#include "flatshard/device/timer.h"

// The link-time choice inside this folder: cuda_*.cpp or no_cuda_device.cpp.
namespace flatshard::detail {

std::shared_ptr<Stream>
make_cuda_stream(at::Device device, std::string name, StreamOptions options);
std::shared_ptr<Stream> current_cuda_stream(at::Device device);
int cuda_compute_capability(at::Device device);
void set_current_cuda_device(at::Device device);
MemoryStats cuda_memory_stats(at::Device device);
void copy_cuda_bytes(
    void* to,
    const void* from,
    std::size_t nbytes,
    at::Device device);
void copy_cuda_bytes(std::span<const BytesCopy> copies, at::Device device);
void count_cuda_memory_outside(at::Device device, std::int64_t nbytes);
/// Pins pages of this process; false if the driver fails.
bool pin_host_memory(void* begin, std::size_t nbytes);
void unpin_host_memory(void* begin) noexcept;
std::unique_ptr<StreamTimer> make_cuda_timer(at::Device device);
std::shared_ptr<GraphPool> make_cuda_graph_pool(
    at::Device device,
    bool audited);
std::unique_ptr<StreamWord> make_cuda_stream_word(at::Device device);
bool current_cuda_stream_records(at::Device device);

std::shared_ptr<Stream> make_cpu_stream(
    std::string name,
    StreamOptions options);
std::shared_ptr<Stream> caller_stream();
bool on_cpu_stream_thread();

/// Returns the delay before a stream's task number `task`, 0..max_delay_us.
int delay_us(
    const std::string& stream,
    std::uint64_t task,
    const StreamOptions& options);

}  // namespace flatshard::detail
