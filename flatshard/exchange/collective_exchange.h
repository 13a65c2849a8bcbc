#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"
#include "flatshard/nn/token_exchange.h"

#include <cstdint>
#include <memory>

namespace flatshard {

struct ExchangeOptions {
  /// Each expert computes the rows of each rank by themselves, in the order of
  /// the ranks. Sums over rows are then those of the ranks, added up: two ranks
  /// give the bits of one that takes their tokens as two microbatches.
  bool groups_by_rank = false;
  /// Of the stream on which rows travel.
  StreamOptions stream;
};

/// Tokens travel by all-to-all between the ranks of a group, each of which has
/// as many experts: rank r those from r * experts / ranks on.
///
/// Rows arrive by expert, those of one expert in the order of the ranks. They
/// travel on a stream of their own, beside what compute is doing. The host
/// waits once for each plan, until the counts of all ranks are there: behind
/// the router, and not behind what was queued since.
class CollectiveExchange : public nn::TokenExchange {
 public:
  /// Collective: connects the ranks.
  ///
  /// @param group        for nothing else; lives longer.
  /// @param num_experts  of a layer, on all ranks together.
  /// @throws Error{config} when they do not divide by the ranks.
  CollectiveExchange(
      std::shared_ptr<Communicator> group,
      std::int64_t num_experts,
      ExchangeOptions options = {});

  nn::ExchangePlanPtr plan(const at::Tensor& counts, std::int64_t num_rows)
      override;
  std::unique_ptr<nn::RowTransfer> start(
      const nn::ExchangePlanPtr& plan,
      Way way,
      const at::Tensor& rows) override;

  /// Rows travel here.
  Stream& stream() { return *stream_; }
  /// Compute's waits for rows are measured from now on, or no longer.
  void measure(bool measures) { measures_ = measures; }
  /// What was measured since the last call, in ms. Blocks the host.
  double wait_and_take_exposed_ms() { return timer_->wait_and_take_ms(); }
  /// After a failure: blocks until what is under way has ended, and forgets
  /// what it threw.
  void reset() noexcept { stream_->reset(); }

 private:
  class Transfer;

  std::shared_ptr<Communicator> group_;
  std::int64_t num_experts_;
  ExchangeOptions options_;
  std::shared_ptr<Stream> stream_;
  std::unique_ptr<StreamTimer> timer_;
  bool measures_ = false;
  bool failed_ = false;     ///< since the last plan
  at::Tensor host_counts_;  ///< int32 [2, experts], pinned beside a GPU
};

}  // namespace flatshard
