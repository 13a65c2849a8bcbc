#include "flatshard/peer/copy_reducer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "flatshard/comm/sum_rows.h"
#include "flatshard/device/memory.h"

namespace flatshard {
namespace {

constexpr int kHalves = 2;
// So that rows start where wide loads can.
constexpr std::int64_t kRowAlignment = 256;

std::int64_t row_nbytes(std::int64_t nbytes, std::int64_t size) {
  const std::int64_t row = nbytes / (kHalves * size);
  return std::max(row / kRowAlignment, std::int64_t{1}) * kRowAlignment;
}

// Views that change nothing cost the host as much as those that do.
at::Tensor flat(const at::Tensor& t) {
  return t.dim() == 1 ? t : t.view({-1});
}

at::Tensor part(const at::Tensor& t, std::int64_t at, std::int64_t n) {
  return n == t.numel() ? t : t.narrow(0, at, n);
}

}  // namespace

CopyReducer::CopyReducer(
    Communicator& group,
    std::int64_t nbytes,
    const StreamOptions& stream)
    : row_nbytes_(row_nbytes(nbytes, group.size())),
      memory_(PeerMemory::create(group, memory_nbytes(nbytes, group.size()))),
      copies_(make_stream(group.device(), "copies", stream)) {
}

std::int64_t CopyReducer::memory_nbytes(
    std::int64_t nbytes,
    std::int64_t ranks) {
  return kHalves * ranks * row_nbytes(nbytes, ranks);
}

bool CopyReducer::supports(const at::Tensor& in) {
  const at::ScalarType dtype = in.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void CopyReducer::restart() {
  copies_->reset();
  half_ = 0;
}

void CopyReducer::copy_piece(
    const at::Tensor& in,
    std::int64_t at,
    std::int64_t n,
    int half) const {
  const int rank = memory_->rank();
  const int size = memory_->size();
  const auto element = static_cast<std::int64_t>(in.element_size());
  const auto* const slices = static_cast<const char*>(in.const_data_ptr());
  const std::int64_t slice = in.numel() / size;
  const std::int64_t row = (half * size + rank) * row_nbytes_;
  // Each rank starts with the next one, so that no two write to the same one.
  for (int i = 1; i < size; ++i) {
    const int peer = (rank + i) % size;
    copy_bytes(
        static_cast<char*>(memory_->of(peer).mutable_data_ptr()) + row,
        slices + (peer * slice + at) * element,
        n * element,
        in.device());
  }
}

void CopyReducer::reduce_scatter(
    const at::Tensor& out,
    const at::Tensor& in,
    ReduceOp op,
    const std::function<void()>& fence) {
  const int rank = memory_->rank();
  const int size = memory_->size();
  const at::Tensor result = flat(out);
  const at::Tensor own =
      flat(in).narrow(0, rank * result.numel(), result.numel());
  if (!typed_.defined() || typed_.scalar_type() != in.scalar_type()) {
    typed_ = memory_->local().view(in.scalar_type());
  }
  const std::int64_t piece =
      row_nbytes_ / static_cast<std::int64_t>(in.element_size());
  const auto begin_piece = [&](std::int64_t at) {
    const std::int64_t n = std::min(piece, result.numel() - at);
    copies_->submit(
        [this, in, at, n, half = half_] { copy_piece(in, at, n, half); });
    half_ = 1 - half_;
  };

  const std::shared_ptr<Stream> here = current_stream(in.device());
  summed_.record(*here);  // and what `in` waits for
  summed_.wait(*copies_);
  begin_piece(0);
  for (std::int64_t at = 0; at < result.numel(); at += piece) {
    summed_.wait(*copies_);
    copies_->submit(fence);
    arrived_.record(*copies_);
    const int half = 1 - half_;
    if (at + piece < result.numel()) {
      begin_piece(at + piece);
    }
    arrived_.wait(*here);
    const std::int64_t n = std::min(piece, result.numel() - at);
    const at::Tensor rows =
        typed_.as_strided({size, n}, {piece, 1}, half * size * piece);
    sum_rows(part(result, at, n), rows, rank, part(own, at, n), op);
    summed_.record(*here);
  }
}

}  // namespace flatshard
