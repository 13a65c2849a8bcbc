#pragma once

#include "flatshard/comm/communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/device/stream.h"
#include "flatshard/device/timer.h"
#include "flatshard/moe/token_exchange.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace flatshard {

struct ExchangeOptions {
  /// Each expert computes the rows of each rank separately, in the order of the
  /// ranks, and adds up the ranks' sums over rows. Two ranks are then bitwise
  /// identical to one rank with their tokens as two microbatches.
  bool groups_by_rank = false;
  /// Number of ranks that split the width of the same experts equally: a row is
  /// sent to all of them, and their results are summed in rank order.
  std::int64_t ranks_per_expert = 1;
  /// Options of the stream on which rows are exchanged.
  StreamOptions stream;
};

struct StreamExchangePlan : nn::ExchangePlan {
  /// The argument of begin_plan. The exchange's stream reads it, so that its
  /// memory is kept until the plan is finished.
  at::Tensor counts;
  Event counted;            ///< the counts exist
  Event known;              ///< the host has the counts that it needs
  std::int64_t number = 0;  ///< 0: its counts have not left
  bool is_finished = false;
};

/// Exchanges tokens between the ranks of a group. Each rank has the same number
/// of experts: rank r starts at r * experts / ranks. Derived classes implement
/// the transport.
///
/// With n ranks per expert, the first ranks / n ranks divide the experts for
/// the first part of their width. The next ranks / n ranks divide them for the
/// second part, and so on. A Mesh orders the ranks over {ep, etp} like this.
///
/// Rows arrive by expert, and within one expert in the order of the ranks. They
/// are exchanged on a separate stream, in parallel with compute. The host waits
/// once for each plan (finish_plan), until the counts of all ranks have
/// arrived: after the router, and not after later work. A dispatch finishes a
/// pending plan. Before that wait it queues the work that needs only this
/// rank's counts (begin_dispatch).
class StreamExchange : public nn::TokenExchange {
 public:
  nn::ExchangePlanPtr begin_plan(
      const at::Tensor& counts,
      std::int64_t num_rows) final;
  /// Plans are finished in the order in which they were started, on all ranks.
  /// @throws Error{usage} when more rows are counted than there are, or a later
  ///   plan was finished before.
  void finish_plan(const nn::ExchangePlanPtr& plan) final;
  std::unique_ptr<nn::RowTransfer> start(
      const nn::ExchangePlanPtr& plan,
      Direction direction,
      const nn::TransferInput& input) override;
  Stream& stream() { return *stream_; }
  /// Compute's waits for rows are measured from now on, or no longer.
  void measure(bool measures) { measures_ = measures; }
  /// Returns the time measured since the last call, in ms. Blocks the host.
  double wait_and_take_exposed_ms() { return timer_->wait_and_take_ms(); }
  /// Called after a failure: blocks until pending work has ended, and clears
  /// its errors.
  void reset() noexcept { stream_->reset(); }
  /// Called after a failure, when ranks may have got to different places: all
  /// of them call it while compute is idle.
  virtual void restart();
  /// Returns the bytes that it uses on the device itself.
  virtual std::int64_t nbytes() const { return 0; }

 protected:
  /// Collective.
  /// @param group  for nothing else; outlives this object.
  /// @throws Error{config} when the experts do not divide by the ranks, or the
  ///   ranks by ranks_per_expert.
  StreamExchange(
      std::shared_ptr<Communicator> group,
      std::int64_t num_experts,
      const ExchangeOptions& options);

  /// Returns a plan with its memory, of the current stream.
  virtual c10::intrusive_ptr<StreamExchangePlan> make_plan(
      const at::Tensor& counts) = 0;
  /// Starts the copy of the counts to the host, after `counted`, and records
  /// `known` after it. The host has room for the counts of one plan.
  virtual void send_counts(StreamExchangePlan& plan) = 0;
  /// Completes the plan from the counts of all ranks.
  virtual void finish(const nn::ExchangePlanPtr& plan) = 0;
  /// Called by a dispatch of tokens before the host waits for other ranks:
  /// queues work that depends only on this rank's counts. The default permutes
  /// the tokens on the current stream.
  /// @param input  becomes the input that is left to transfer.
  virtual void begin_dispatch(
      const nn::ExchangePlanPtr& plan,
      nn::TransferInput& input);
  /// Called before each transfer, of a plan that is finished.
  virtual void reserve(
      const nn::ExchangePlanPtr& /*plan*/,
      const nn::TransferInput& /*input*/) {}
  /// Returns whether `transfer` accepts tokens like these
  /// (TransferInput::tokens). Otherwise they are permuted before it, and added
  /// up after it.
  virtual bool takes_tokens(const at::Tensor& /*tokens*/) const {
    return false;
  }
  /// Returns the stream's work that transfers `input` to `out`. All tensors are
  /// defined.
  virtual std::function<void()> transfer(
      const nn::ExchangePlanPtr& plan,
      Direction direction,
      const nn::TensorList& out,
      const nn::TransferInput& input) = 0;

  /// @throws Error{usage} for a plan of another exchange.
  template <class Plan>
  static Plan* own(const nn::ExchangePlanPtr& plan) {
    auto* const made = dynamic_cast<Plan*>(plan.get());
    FLATSHARD_CHECK(
        made,
        usage,
        "exchange of tokens: expected a plan of this exchange, got another's");
    return made;
  }
  /// Blocks the host until this rank's counts are on it.
  void wait_for_counts(StreamExchangePlan& plan);
  /// Work for the stream, in the order that all ranks have.
  void submit(std::function<void()> work);
  /// Checks the number of rows that leave this rank or stay.
  static void check_num_rows(std::int64_t counted, std::int64_t num_rows);

  Communicator& group() { return *group_; }
  std::int64_t num_experts() const { return num_experts_; }
  std::int64_t experts_per_rank() const {
    return num_experts_ / ranks_per_part();
  }
  std::int64_t ranks_per_expert() const { return options_.ranks_per_expert; }
  /// Returns the number of ranks that divide the experts, for one part of their
  /// width.
  std::int64_t ranks_per_part() const {
    return group_->size() / options_.ranks_per_expert;
  }
  bool groups_by_rank() const { return options_.groups_by_rank; }

  std::atomic<bool> failed_ = false;  ///< something since the last plan

 private:
  class Transfer;

  void begin(StreamExchangePlan& plan);
  /// One of compute's waits; see measure().
  void await(const Event& event);
  std::function<void()> work_of(
      const nn::ExchangePlanPtr& plan,
      Direction direction,
      const nn::TensorList& out,
      const nn::TransferInput& input);

  std::shared_ptr<Communicator> group_;
  std::int64_t num_experts_;
  ExchangeOptions options_;
  std::shared_ptr<Stream> stream_;
  std::unique_ptr<StreamTimer> timer_;
  std::int64_t num_begun_ = 0;  ///< plans whose counts have left
  std::int64_t finished_ = 0;   ///< the number of the last one
  bool measures_ = false;
};

}  // namespace flatshard
