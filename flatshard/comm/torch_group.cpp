#include "flatshard/comm/torch_group.h"

#include <mutex>
#include <utility>
#include <vector>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"

namespace flatshard {
namespace {

class GlooTorchGroup : public TorchGroup {
 public:
  GlooTorchGroup(detail::BackendHandle backend, std::string name)
      : backend_(std::move(backend)), name_(std::move(name)) {}

  void broadcast(const at::Tensor& tensor) override {
    std::vector<at::Tensor> tensors{detail::as_bytes(tensor)};
    detail::with_comm_errors(name_ + " | broadcast", [&] {
      c10::intrusive_ptr<c10d::Work> sent;
      {
        const std::lock_guard lock(detail::gloo_launch_mutex());
        sent = backend_->broadcast(tensors, {});
      }
      sent->wait();
    });
  }

  void abort() override { detail::abort_gloo_backend(*backend_); }

 private:
  detail::BackendHandle backend_;
  std::string name_;
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
  const StoreHandle keys =
      make_prefix_store(options.device.is_cuda() ? "cuda/" : "cpu/", of_group);
  if (options.device.is_cuda()) {
    return detail::make_nccl_torch_group(keys, options);
  }
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      options.deadline - std::chrono::steady_clock::now());
  detail::BackendHandle backend;
  detail::with_comm_errors(options.name + " | connect", [&] {
    FLATSHARD_CHECK(left.count() > 0, timeout, "no time is left");
    backend = detail::connect_gloo_backend(
        keys,
        /*rank=*/0,
        options.size,
        {.timeout = left});
  });
  return std::make_shared<GlooTorchGroup>(std::move(backend), options.name);
}

}  // namespace flatshard
