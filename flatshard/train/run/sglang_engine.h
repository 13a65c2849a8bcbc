#pragma once

#include "flatshard/comm/torch_group.h"
#include "flatshard/core/http.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace flatshard {

/// A tensor that an engine receives.
struct SentTensor {
  std::string name;  ///< in a Hugging Face folder
  at::ScalarType dtype = at::kBFloat16;
  std::vector<std::int64_t> shape;
};

/// An inference engine that has SGLang's routes, while it receives weights: a
/// request announces tensors, and a broadcast in a group of this process and
/// the engine's ranks sends them. From the first request until `finish` the
/// engine generates nothing.
///
/// All functions block, and throw Error{comm} naming a route if the engine is
/// not reached, refuses a request or dies, or Error{timeout} at the deadline.
/// An engine that got some of the weights stays paused until it gets all.
class SglangEngine {
 public:
  struct Options {
    HttpServer server;
    int num_ranks = 1;  ///< tensor-parallel ranks of the engine
  };

  /// Pauses generation, and makes the group.
  /// @param device  of the tensors.
  /// @param step    of the weights.
  SglangEngine(
      const Options& options,
      at::Device device,
      std::int64_t step,
      std::chrono::steady_clock::time_point deadline);
  SglangEngine(const SglangEngine&) = delete;
  SglangEngine& operator=(const SglangEngine&) = delete;
  ~SglangEngine();

  /// Sends tensors.
  /// @param bytes  [n] uint8: their elements, one tensor after another. Each
  ///   starts at a multiple of the size of its elements.
  /// @param last   the engine has all tensors afterwards.
  void send(
      const std::vector<SentTensor>& tensors,
      const at::Tensor& bytes,
      bool last);

  /// Ends the group, and generation continues.
  void finish();

 private:
  void call(const std::string& route, const std::string& body) const;
  /// Calls a route, and runs `work` meanwhile: the engine answers after it.
  void call_during(
      const std::string& route,
      const std::string& body,
      const std::function<void()>& work);

  const Options options_;
  const std::int64_t step_;
  const std::chrono::steady_clock::time_point deadline_;
  const std::string group_name_;
  StoreHandle store_;
  std::shared_ptr<TorchGroup> group_;
};

}  // namespace flatshard
