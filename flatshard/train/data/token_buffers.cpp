#include "flatshard/train/data/token_buffers.h"

#include <ATen/ATen.h>

namespace flatshard {
namespace {

std::span<std::int64_t> elements(const at::Tensor& tensor) {
  return {
      tensor.data_ptr<std::int64_t>(),
      static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

TokenBuffers::TokenBuffers(std::shared_ptr<Mesh> mesh, at::IntArrayRef shape)
    : mesh_(std::move(mesh)) {
  const at::Device device = mesh_->device();
  const auto options = at::TensorOptions().dtype(at::kLong);
  const auto host = options.pinned_memory(device.is_cuda());
  tokens_host_ = at::empty(shape, host);
  targets_host_ = at::empty(shape, host);
  tokens_ = at::empty(shape, options.device(device));
  targets_ = at::empty(shape, options.device(device));
}

void TokenBuffers::load(const Fill& fill) {
  copied_.synchronize();
  mesh_->check();  // an aborted stream ends its waits without a result
  fill(elements(tokens_host_), elements(targets_host_));
  tokens_.copy_(tokens_host_, /*non_blocking=*/true);
  targets_.copy_(targets_host_, /*non_blocking=*/true);
  copied_.record(*current_stream(mesh_->device()));
}

}  // namespace flatshard
