#include "flatshard/comm/torch_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

constexpr auto kPause = std::chrono::milliseconds(2);

constexpr const char* kAborted = "the group was aborted";

/// An Error in Gloo's connect. It is not a std::runtime_error because torch
/// writes a line to stderr about each of these there.
class ConnectError : public std::exception {
 public:
  explicit ConnectError(Error error) : error_(std::move(error)) {}
  const char* what() const noexcept override { return error_.what(); }
  const Error& error() const { return error_; }

 private:
  Error error_;
};

/// A store of which the waits can be ended: torch's own waits cannot.
class AbortableStore : public c10d::PrefixStore {
 public:
  using c10d::PrefixStore::PrefixStore;

  void abort() { aborted_ = true; }
  void check_aborted() const { FLATSHARD_CHECK(!aborted_, comm, kAborted); }

  std::vector<std::uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(
      const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    wait(keys, getTimeout());
  }
  void wait(
      const std::vector<std::string>& keys,
      const std::chrono::milliseconds& timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!check(keys)) {
      if (aborted_) {
        throw ConnectError(Error(ErrorCode::comm, kAborted));
      }
      if (std::chrono::steady_clock::now() > deadline) {
        throw ConnectError(Error(
            ErrorCode::timeout,
            "the group's other ranks did not join in time"));
      }
      std::this_thread::sleep_for(kPause);
    }
  }

 private:
  std::atomic<bool> aborted_ = false;
};

class GlooTorchGroup : public TorchGroup {
 public:
  GlooTorchGroup(
      c10::intrusive_ptr<AbortableStore> store,
      TorchGroupOptions options)
      : store_(std::move(store)),
        options_(std::move(options)),
        name_(options_.name) {}

  void join() override {
    detail::with_comm_errors(name_ + " | connect", [&] {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          options_.deadline - std::chrono::steady_clock::now());
      FLATSHARD_CHECK(left.count() > 0, timeout, "no time is left");
      auto backend = connect(left);
      const std::lock_guard lock(mutex_);
      backend_ = std::move(backend);
      store_->check_aborted();
    });
  }

  void broadcast(const at::Tensor& tensor) override {
    std::vector<at::Tensor> tensors{detail::as_bytes(tensor)};
    detail::with_comm_errors(name_ + " | broadcast", [&] {
      store_->check_aborted();
      c10::intrusive_ptr<c10d::Work> sent;
      {
        const std::lock_guard lock(detail::gloo_launch_mutex());
        sent = backend_->broadcast(tensors, {});
      }
      sent->wait();
    });
  }

  void abort() override {
    store_->abort();
    const std::lock_guard lock(mutex_);
    if (backend_) {
      detail::abort_gloo_backend(*backend_);
    }
  }

 private:
  detail::BackendHandle connect(std::chrono::milliseconds limit) const {
    try {
      return detail::connect_gloo_backend(
          store_,
          /*rank=*/0,
          options_.size,
          {.timeout = limit});
    } catch (const ConnectError& error) {
      throw error.error();
    }
  }

  const c10::intrusive_ptr<AbortableStore> store_;
  const TorchGroupOptions options_;
  const std::string name_;
  std::mutex mutex_;               ///< of `backend_`, until it is connected
  detail::BackendHandle backend_;  ///< null before `join`
};

}  // namespace

std::shared_ptr<TorchGroup> make_torch_group(
    const StoreHandle& store,
    const TorchGroupOptions& options) {
  FLATSHARD_CHECK(
      options.size >= 2,
      usage,
      "group '{}': expected at least one other rank, got {} ranks",
      options.name,
      options.size);
  // The prefixes of the users of torch's _new_process_group_helper, and of that
  // function itself: the name, the name and a slash, the device and a slash.
  const StoreHandle of_name = make_prefix_store(options.name, store);
  const StoreHandle of_group = make_prefix_store(options.name + "/", of_name);
  if (options.device.is_cuda()) {
    return detail::make_nccl_torch_group(
        make_prefix_store("cuda/", of_group),
        options);
  }
  return std::make_shared<GlooTorchGroup>(
      c10::make_intrusive<AbortableStore>("cpu/", of_group),
      options);
}

}  // namespace flatshard
