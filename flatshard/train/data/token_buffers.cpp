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

TokenBuffers::TokenBuffers(std::shared_ptr<Mesh> mesh, const Options& options)
    : mesh_(std::move(mesh)), options_(options) {
  const at::Device device = mesh_->device();
  const auto words = at::TensorOptions().dtype(at::kLong);
  const auto host = words.pinned_memory(device.is_cuda());
  const std::int64_t seq = options.seq_len / options.part.num_parts();
  const std::vector<std::int64_t> all{
      options.num_microbatches,
      options.rows * options.seq_len};
  const std::vector<std::int64_t> own{
      options.num_microbatches,
      options.rows,
      seq};
  tokens_host_ = at::empty(all, host);
  targets_host_ = at::empty(all, host);
  tokens_ = at::empty(own, words.device(device));
  targets_ = at::empty(own, words.device(device));
}

void TokenBuffers::load(const Fill& fill) {
  copied_.synchronize();
  mesh_->check();  // an aborted stream ends its waits without a result
  fill(elements(tokens_host_), elements(targets_host_));
  queue_copy(tokens_host_, tokens_);
  queue_copy(targets_host_, targets_);
  copied_.record(*current_stream(mesh_->device()));
}

// One copy for each contiguous range.
void TokenBuffers::queue_copy(const at::Tensor& from, at::Tensor& to) const {
  if (options_.part.num_parts() == 1) {
    to.copy_(from.view(to.sizes()), /*non_blocking=*/true);
    return;
  }
  for (std::int64_t m = 0; m < options_.num_microbatches; ++m) {
    const at::Tensor own = to[m].view({-1});
    std::int64_t begin = 0;
    for (const TokenRange& range : options_.part.of(from.size(1))) {
      own.narrow(0, begin, range.size())
          .copy_(
              from[m].narrow(0, range.begin, range.size()),
              /*non_blocking=*/true);
      begin += range.size();
    }
  }
}

at::Tensor TokenBuffers::tokens(std::int64_t microbatch) const {
  return tokens_[microbatch];
}

at::Tensor TokenBuffers::targets(std::int64_t microbatch) const {
  return targets_[microbatch];
}

}  // namespace flatshard
