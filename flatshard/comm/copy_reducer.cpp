#include "flatshard/comm/copy_reducer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "flatshard/comm/sum_rows.h"
#include "flatshard/device/memory.h"

namespace flatshard {
namespace {

constexpr int kHalves = 2;
// So that rows begin where wide loads can.
constexpr std::int64_t kRowAlignment = 256;

std::int64_t row_nbytes(std::int64_t nbytes, int size) {
  const std::int64_t row = nbytes / (kHalves * size);
  return std::max(row / kRowAlignment, std::int64_t{1}) * kRowAlignment;
}

}  // namespace

CopyReducer::CopyReducer(Communicator& group, std::int64_t nbytes)
    : row_nbytes_(row_nbytes(nbytes, group.size())),
      memory_(PeerMemory::create(group, kHalves * group.size() * row_nbytes_)) {
}

bool CopyReducer::takes(const at::Tensor& in) {
  const at::ScalarType dtype = in.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void CopyReducer::reduce_scatter(
    const at::Tensor& out,
    const at::Tensor& in,
    ReduceOp op,
    const std::function<void()>& fence) {
  const int rank = memory_->rank();
  const int size = memory_->size();
  const auto element = static_cast<std::int64_t>(in.element_size());
  const auto* const slices = static_cast<const char*>(in.const_data_ptr());
  const at::Tensor result = out.view({-1});
  const std::int64_t piece = row_nbytes_ / element;
  for (std::int64_t at = 0; at < result.numel(); at += piece) {
    const std::int64_t n = std::min(piece, result.numel() - at);
    const std::int64_t row = (half_ * size + rank) * row_nbytes_;
    // The ranks begin with their next one each, so that no two write to one.
    for (int i = 1; i < size; ++i) {
      const int peer = (rank + i) % size;
      copy_bytes(
          static_cast<char*>(memory_->of(peer).mutable_data_ptr()) + row,
          slices + (peer * result.numel() + at) * element,
          n * element,
          in.device());
    }
    fence();
    const at::Tensor rows =
        memory_->local()
            .view(in.scalar_type())
            .as_strided({size, n}, {piece, 1}, half_ * size * piece);
    sum_rows(
        result.narrow(0, at, n),
        rows,
        rank,
        in.view({-1}).narrow(0, rank * result.numel() + at, n),
        op);
    half_ = 1 - half_;
  }
}

}  // namespace flatshard
