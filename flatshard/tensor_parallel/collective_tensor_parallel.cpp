#include "flatshard/tensor_parallel/collective_tensor_parallel.h"

#include "flatshard/device/stream_use.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

// Allocates a tensor like x, with another number of rows.
at::Tensor room_like(const at::Tensor& x, std::int64_t num_rows) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.at(0) = num_rows;
  return at::empty(sizes, x.options());
}

}  // namespace

class CollectiveTensorParallel::Pending : public nn::PendingTensor {
 public:
  Pending(at::Tensor out, at::Tensor in, std::shared_ptr<Stream> stream)
      : out_(std::move(out)), in_(std::move(in)) {
    use_.until_now(std::move(stream));
  }

  at::Tensor finish() override {
    use_.wait();
    in_ = at::Tensor();
    return std::move(out_);
  }

 private:
  at::Tensor out_;
  at::Tensor in_;
  StreamUse use_;
};

CollectiveTensorParallel::CollectiveTensorParallel(
    std::shared_ptr<Communicator> group,
    StreamOptions options)
    : TensorParallel(group->rank(), group->size()), group_(std::move(group)) {
  options.high_priority = true;
  stream_ = make_stream(group_->device(), "tensor parallelism", options);
}

at::Tensor CollectiveTensorParallel::all_gather(const at::Tensor& part) {
  at::Tensor whole = room_like(part, part.size(0) * size());
  group_->all_gather(whole, part);
  return whole;
}

at::Tensor CollectiveTensorParallel::reduce_scatter(const at::Tensor& addend) {
  at::Tensor part = room_like(addend, addend.size(0) / size());
  group_->reduce_scatter(part, addend, ReduceOp::sum);
  return part;
}

std::unique_ptr<nn::PendingTensor> CollectiveTensorParallel::start(
    const at::Tensor& out,
    const at::Tensor& in,
    std::function<void()> work) {
  Event ready;
  ready.record(*current_stream(group_->device()));
  ready.wait(*stream_);
  Communicator* const group = group_.get();
  queue_collectives(*stream_, {&group, 1}, std::move(work));
  return std::make_unique<Pending>(out, in, stream_);
}

std::unique_ptr<nn::PendingTensor> CollectiveTensorParallel::start_all_gather(
    const at::Tensor& part) {
  const at::Tensor whole = room_like(part, part.size(0) * size());
  return start(whole, part, [this, whole, part] {
    group_->all_gather(whole, part);
  });
}

std::unique_ptr<nn::PendingTensor>
CollectiveTensorParallel::start_reduce_scatter(const at::Tensor& addend) {
  const at::Tensor part = room_like(addend, addend.size(0) / size());
  return start(part, addend, [this, part, addend] {
    group_->reduce_scatter(part, addend, ReduceOp::sum);
  });
}

}  // namespace flatshard
