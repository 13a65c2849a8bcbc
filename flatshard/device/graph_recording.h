#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <exception>
#include <utility>

// The only place for differences between torch versions in CUDA graphs.
namespace flatshard::detail {

/// torch's graph while it is recorded. Older versions of torch need a list of
/// the generators that are drawn from. They leave the allocator in the middle
/// of a capture when the recording fails.
class GraphRecording : public at::cuda::CUDAGraph {
 public:
  /// @param keeps_nodes  `raw_cuda_graph` exists after `end`.
  explicit GraphRecording(bool keeps_nodes)
      : CUDAGraph(keeps_nodes), keeps_nodes_(keeps_nodes) {}

  /// Called before `begin`, for each generator that is drawn from in addition
  /// to the default one.
  void draws_from(const at::Generator& generator) { enlist(*this, generator); }

  void begin(at::cuda::MempoolId_t pool) {
    try {
      capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    } catch (...) {
      stop_allocating();
      stop_drawing();
      throw;
    }
    recording_ = true;
  }
  void end() {
    recording_ = false;
    try {
      capture_end();
    } catch (...) {
      stop_allocating();
      stop_drawing();
      throw;
    }
    if (keeps_nodes_) {
      instantiate();
    }
  }
  /// Called after an exception of what was recorded.
  void give_up() noexcept {
    if (!std::exchange(recording_, false)) {
      return;
    }
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(capture_stream_, &graph);
    if (graph != nullptr) {
      cudaGraphDestroy(graph);
    }
    cudaGetLastError();  // clears the error of the capture
    stop_allocating();
    stop_drawing();
  }

 private:
  // Newer versions do it at a generator's first draw.
  template <class Graph>
  static void enlist(Graph& graph, const at::Generator& generator) {
    if constexpr (requires { graph.register_generator_state(generator); }) {
      graph.register_generator_state(generator);
    }
  }

  // A generator that is left in the middle of a capture throws when it draws.
  // Newer versions have a state per capture that is destroyed with the graph.
  void stop_drawing() noexcept {
    for (const auto& [generator, increment] : captured_generator_states_) {
      stop_drawing(*generator);
    }
  }
  template <class State>
  static void stop_drawing(State& generator) {
    if constexpr (requires { generator.capturing_ = false; }) {
      generator.capturing_ = false;
    }
  }

  // Newer versions note it, and do it when the graph is destroyed.
  template <class Graph = GraphRecording>
  void stop_allocating() noexcept {
    if constexpr (!requires(Graph & graph) { graph.capturing_to_pool_; }) {
      try {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(
            capture_stream_.device_index(),
            mempool_id_);
        c10::cuda::CUDACachingAllocator::releasePool(
            capture_stream_.device_index(),
            mempool_id_);
      } catch (const std::exception&) {
        // It had already ended.
      }
      try {
        // The pool is kept: an unused pool accepts no recordings.
        at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_);
      } catch (const std::exception&) {
        // See above.
      }
    }
  }

  bool keeps_nodes_;
  bool recording_ = false;
};

}  // namespace flatshard::detail
