#include "flatshard/train/run/signal_requests.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>

#include "flatshard/comm/collective_scope.h"

namespace flatshard {
namespace {

constexpr std::chrono::seconds kSameRequest{1};

}  // namespace

SignalRequests::SignalRequests(
    std::shared_ptr<Mesh> mesh,
    std::int64_t log_freq)
    : mesh_(std::move(mesh)), log_freq_(log_freq) {
}

Requests SignalRequests::take(double step_ms) {
  const int stop_signal = signals_.stop_signal();
  std::array<std::int64_t, 5> counts{
      static_cast<std::int64_t>(take_save_request()),
      static_cast<std::int64_t>(stop_signal == SIGINT),
      static_cast<std::int64_t>(stop_signal == SIGTERM),
      static_cast<std::int64_t>(stop_signal == SIGHUP),
      // Rank 0's clock counts.
      mesh_->rank() == 0 ? std::llround(step_ms * 1000) : 0};
  if (mesh_->size() > 1) {
    const at::Tensor sum =
        at::tensor(at::ArrayRef<std::int64_t>(counts)).to(mesh_->device());
    const CollectiveScope scope("signals");
    mesh_->world(Purpose::reduce).all_reduce(sum, ReduceOp::sum);
    const at::Tensor host = sum.cpu();
    mesh_->check();
    std::copy_n(
        host.const_data_ptr<std::int64_t>(),
        counts.size(),
        counts.begin());
    constexpr std::int64_t kLookEveryUs = 1'000'000;
    freq_ = std::clamp<std::int64_t>(
        kLookEveryUs / std::max<std::int64_t>(counts[4], 1),
        1,
        log_freq_);
  }
  const bool save = counts[0] > 0;
  if (save) {
    same_save_until_ = std::chrono::steady_clock::now() + kSameRequest;
  }
  return {
      .save = save,
      .stop_signal = counts[2] > 0   ? SIGTERM
                     : counts[1] > 0 ? SIGINT
                     : counts[3] > 0 ? SIGHUP
                                     : 0};
}

bool SignalRequests::take_save_request() {
  const auto asked = signals_.take_save_request();
  return asked && *asked >= same_save_until_;
}

}  // namespace flatshard
