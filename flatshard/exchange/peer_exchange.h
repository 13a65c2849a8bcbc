#pragma once

#include "flatshard/device/memory.h"
#include "flatshard/exchange/narrow_rows.h"
#include "flatshard/exchange/row_runs.h"
#include "flatshard/exchange/stream_exchange.h"
#include "flatshard/peer/peer_memory.h"

namespace flatshard {

struct PeerExchangeOptions {
  /// Bytes of the largest transfer of a rank: its routed rows (tokens *
  /// experts_per_token), times the bytes of one row and its extra data (for a
  /// Moe: its float32 weight). Tensors that do not fit together are sent one
  /// after the other, with a fence each. Equal on all ranks. Allocates twice
  /// this size. 0: `start` makes the windows, and makes them again if a
  /// transfer of any rank needs more. Then the host waits for all ranks.
  std::int64_t window_nbytes = 0;
  ExchangeOptions exchange;
};

/// Exchanges tokens by peer-to-peer copies through shared memory (on GPUs by
/// the copy engines). Results are bitwise identical to CollectiveExchange.
///
/// Each rank has a window for the rows that it routes, by expert. For a
/// dispatch it fills its own window, and the ranks of the experts read from
/// there. For a combine they write there, and it reads its own. So a window
/// never contains more than its rank's own rows, however many of them go to one
/// rank. Tensors of one transfer are stored there one after the other. Windows
/// have two halves, used in turn, with a fence between writing and reading. One
/// fence for each transfer is enough: a rank past it has read the data that the
/// transfer before left in the other half.
///
/// Tokens (nn::TransferInput) are permuted straight into the window and, where
/// their expert is here, to the place of its rows. They are added up from the
/// window and from the places where this rank's experts left them. So rows that
/// stay are not copied, and others once, from one rank to the other.
///
/// Counts are sent from host to host through shared pages.
class PeerExchange : public StreamExchange {
 public:
  /// Collective.
  ///
  /// @param group        for nothing else; its fences are used, so give it
  ///   make_peer_communicator's on GPUs.
  /// @param hosts the same ranks on their hosts; all-gathers 4 bytes for each
  ///   expert (make_page_communicator).
  /// @param num_experts  of a layer, on all ranks together.
  /// @throws Error{config} when they do not divide by the ranks, for ranks that
  ///   share an expert, or as PeerMemory::create.
  PeerExchange(
      std::shared_ptr<Communicator> group,
      std::shared_ptr<Communicator> hosts,
      std::int64_t num_experts,
      const PeerExchangeOptions& options);

  /// Returns the bytes of windows on each rank, of
  /// PeerExchangeOptions::window_nbytes.
  static std::int64_t windows_nbytes(std::int64_t window_nbytes);

  void restart() override;
  std::int64_t nbytes() const override {
    return windows_ ? windows_->local().numel() : 0;
  }

 protected:
  c10::intrusive_ptr<StreamExchangePlan> make_plan(
      const at::Tensor& counts) override;
  /// @throws Error{comm} after a failure, before restart().
  void send_counts(StreamExchangePlan& plan) override;
  void finish(const nn::ExchangePlanPtr& plan) override;
  /// Permutes rows that leave into the window.
  void begin_dispatch(const nn::ExchangePlanPtr& plan, nn::TransferInput& input)
      override;
  /// Makes windows that grow.
  /// @throws Error{memory} on all ranks when they cannot, Error{config} when a
  ///   tensor of one of them does not fit a window that does not grow.
  void reserve(const nn::ExchangePlanPtr& plan, const nn::TransferInput& input)
      override;
  bool takes_tokens(const at::Tensor& tokens) const override {
    return nn::can_split_rows(tokens);
  }
  std::function<void()> transfer(
      const nn::ExchangePlanPtr& plan,
      Direction direction,
      const nn::TensorList& out,
      const nn::TransferInput& input) override;

 private:
  struct Plan;

  /// One tensor of a transfer, in bytes.
  struct Part {
    std::int64_t row = 0;
    char* at_home = nullptr;
    char* at_experts = nullptr;
    std::int64_t in_window = 0;  ///< offset in the window of each rank
    /// On the source rank it has a row for each token, and kernels copy this
    /// rank's rows from and to the window.
    bool of_tokens = false;
    bool is_narrow = false;  ///< see are_narrow; not of tokens
  };

  /// Collective. @param nbytes  of the largest transfer
  void make_windows(std::int64_t nbytes);
  /// Returns the parts of each fence.
  /// @param of_tokens  the first one is.
  std::vector<std::vector<Part>> parts_by_fence(
      const Plan& plan,
      const nn::TensorList& at_home,
      const nn::TensorList& at_experts,
      bool of_tokens) const;
  /// @param arrived  of the transfer's first tensor
  /// @param has_begun  rows that leave are in the window; see begin_dispatch
  void dispatch(
      const Plan& plan,
      const std::vector<Part>& parts,
      const nn::TransferInput& input,
      const at::Tensor& arrived,
      bool has_begun);
  /// @param sums  likewise
  void combine(
      const Plan& plan,
      const std::vector<Part>& parts,
      const nn::TransferInput& input,
      const at::Tensor& sums);
  /// Brings narrow rows to the experts here, or back, and returns the copies
  /// that do so with others.
  std::vector<BytesCopy> expert_copies(
      const Plan& plan,
      const std::vector<Part>& parts,
      bool arrive) const;
  /// Copies of a part between its tensor at home and this rank's window: of
  /// rows for other ranks, or of all rows of a narrow one.
  std::vector<BytesCopy> home_copies(
      const Plan& plan,
      const std::vector<Part>& parts,
      bool leaves) const;
  /// [num_rows, dim] of `like`'s dtype at the start of this rank's window,
  /// where rows of tokens are.
  at::Tensor
  rows_in_window(int half, std::int64_t num_rows, const at::Tensor& like) const;
  /// Returns the tables that a plan uploads.
  RunTables tables();
  void copy(const std::vector<BytesCopy>& copies) const;
  /// Returns the window of rank `rank`, in the half that this transfer uses.
  char* window(int rank, const Part& part) const;

  std::shared_ptr<Communicator> hosts_;
  bool grows_;
  std::int64_t window_nbytes_ = 0;
  std::int64_t half_nbytes_ = 0;
  std::unique_ptr<PeerMemory> windows_;  ///< null: none is needed yet
  at::Tensor addresses_;                 ///< int64: of windows_, by rank
  int half_ = 0;                         ///< used by the last transfer
  std::shared_ptr<Stream> counts_;       ///< counts leave the device here
  /// int32, pinned: counts of all experts, then the upload of a plan.
  at::Tensor host_;
};

}  // namespace flatshard
