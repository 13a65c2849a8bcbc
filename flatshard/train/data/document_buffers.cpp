#include "flatshard/train/data/document_buffers.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace flatshard {
namespace {

template <class T>
std::span<T> row_of(const at::Tensor& tensor, std::int64_t row) {
  return {
      tensor.mutable_data_ptr<T>() + row * tensor.size(1),
      static_cast<std::size_t>(tensor.size(1))};
}

}  // namespace

DocumentBuffers::DocumentBuffers(
    std::shared_ptr<Mesh> mesh,
    const Options& options)
    : options_(options),
      used_(static_cast<std::size_t>(options.num_microbatches)) {
  const at::Device device = mesh->device();
  const auto words = at::TensorOptions().dtype(at::kInt);
  const auto host = words.pinned_memory(device.is_cuda());
  // A row's padding is a document, too.
  const std::vector<std::int64_t> offsets{
      options.num_microbatches,
      options.rows * (options.max_documents + 1) + 1};
  const std::vector<std::int64_t> positions{
      options.num_microbatches,
      options.rows * options.seq_len};
  offsets_host_ = at::empty(offsets, host);
  positions_host_ = at::empty(positions, host);
  offsets_ = at::empty(offsets, words.device(device));
  positions_ = at::empty(positions, words.device(device));
  padding_host_ = at::empty(positions, host.dtype(at::kBool));
  padding_ = at::empty(positions, padding_host_.options().device(device));
}

void DocumentBuffers::write(
    std::int64_t microbatch,
    const data::DocumentLengths& documents) {
  const std::vector<std::int64_t>& lengths = documents.lengths;
  nn::write_documents(
      lengths,
      options_.seq_len,
      row_of<std::int32_t>(offsets_host_, microbatch),
      row_of<std::int32_t>(positions_host_, microbatch));
  nn::write_padding(
      documents.padding,
      options_.seq_len,
      row_of<bool>(padding_host_, microbatch));
  used_.at(static_cast<std::size_t>(microbatch)) = {
      .num_documents = static_cast<std::int64_t>(lengths.size()),
      .max_length = *std::ranges::max_element(lengths)};
}

void DocumentBuffers::queue_copies() {
  offsets_.copy_(offsets_host_, /*non_blocking=*/true);
  positions_.copy_(positions_host_, /*non_blocking=*/true);
  padding_.copy_(padding_host_, /*non_blocking=*/true);
}

nn::Documents DocumentBuffers::documents(std::int64_t microbatch) const {
  const Used& used = used_.at(static_cast<std::size_t>(microbatch));
  const bool fixed = options_.fixed_shapes;
  const at::Tensor offsets = offsets_[microbatch];
  return {
      .offsets = fixed ? offsets : offsets.narrow(0, 0, used.num_documents + 1),
      .positions = positions_[microbatch],
      .max_length = fixed ? options_.seq_len : used.max_length,
      .padding = padding_[microbatch]};
}

}  // namespace flatshard
