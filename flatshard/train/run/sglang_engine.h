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

/// An inference engine that has SGLang's routes: a request announces tensors,
/// and a broadcast in a group of this process and the engine's ranks sends
/// them. From `begin` until `finish` or `give_up` the engine generates nothing.
///
/// All functions block. Except `give_up` they throw Error{comm} naming a route
/// if the engine is not reached, refuses a request or dies, or Error{timeout}
/// at the deadline. Call `give_up` then. Status 200 with `"success": false` is
/// a refusal.
class SglangEngine {
 public:
  struct Options {
    HttpServer server;
    int num_ranks = 1;  ///< tensor-parallel ranks of the engine
  };

  /// @param device  of the tensors.
  SglangEngine(const Options& options, at::Device device)
      : options_(options), device_(device) {}
  SglangEngine(const SglangEngine&) = delete;
  SglangEngine& operator=(const SglangEngine&) = delete;
  ~SglangEngine() { give_up(); }

  /// Pauses generation, and makes the group.
  /// @param step      of the weights.
  /// @param deadline  of all functions until `finish`.
  void begin(std::int64_t step, std::chrono::steady_clock::time_point deadline);

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
  /// Ends the group without `finish`. Generation continues, unless the engine
  /// has some of the weights of a send: then it stays paused until it has all.
  /// A failure is only logged; blocks for at most 10 seconds. Has no effect
  /// after `finish`.
  void give_up() noexcept;
  /// Returns whether the engine has only a part of the weights of a send, and
  /// stays paused.
  bool has_some_weights() const { return has_some_weights_; }

 private:
  void end_group(std::chrono::steady_clock::time_point deadline);
  void call(const std::string& route, const std::string& body) const;
  /// Calls a route, and runs `work` meanwhile: the engine answers after it.
  void call_during(
      const std::string& route,
      const std::string& body,
      const std::function<void()>& work);

  const Options options_;
  const at::Device device_;
  bool is_paused_ = false;
  bool has_group_ = false;  ///< or may have it: it was asked to join
  /// An update was announced, and the last one of its send was not answered.
  /// Later sends that fail before an update do not change it.
  bool has_some_weights_ = false;
  // Of the last send.
  std::int64_t step_ = 0;
  std::chrono::steady_clock::time_point deadline_;
  std::string group_name_;
  StoreHandle store_;
  std::shared_ptr<TorchGroup> group_;
};

}  // namespace flatshard
