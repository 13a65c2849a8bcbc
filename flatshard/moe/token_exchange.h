#pragma once

#include "flatshard/device/stream.h"
#include "flatshard/moe/permute.h"
#include "flatshard/nn/visit.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace flatshard::nn {

/// Describes the exchange of the rows of one routing: made once, in the
/// forward, and used by its backward and by a recompute as well. Exchanges
/// derive from it to add their own data.
struct ExchangePlan : torch::CustomClassHolder {
  /// int32 [experts here * groups_per_expert], on the rows' device: the end of
  /// each group of rows among the rows that dispatch delivers. Experts are in
  /// their order; rows after the last end are unused and arbitrary.
  at::Tensor ends;
  /// Above 1: the rows of an expert are in this many groups, by the rank that
  /// sent them, and each group is a separate matmul.
  std::int64_t groups_per_expert = 1;
  std::int64_t num_sent = 0;      ///< rows that dispatch sends
  std::int64_t num_received = 0;  ///< rows that dispatch delivers
};
using ExchangePlanPtr = c10::intrusive_ptr<ExchangePlan>;

/// The tensors that are exchanged in one transfer.
struct TransferInput {
  /// The tensors follow one another, each contiguous and with a row for each
  /// row of the plan. An undefined tensor stays undefined, and must be
  /// undefined on all ranks.
  TensorList rows;
  /// Set: the first tensor must be defined. A dispatch sends its [tokens, dim]
  /// as if permute_rows had made rows of them. A combine delivers [tokens, dim]
  /// as if sum_rows_of_tokens had added up the arrived rows. This may save a
  /// pass over the rows.
  std::optional<Permutation> tokens;
  /// The sums of a combine of tokens are added to this, like
  /// sum_rows_of_tokens' addend. The result has its shape.
  at::Tensor addend;
  /// The event that the transfer waits for. Unset: all that the current stream
  /// has queued. A pending plan is finished before it.
  std::optional<Event> after = {};
};

/// Rows under way.
class RowTransfer {
 public:
  virtual ~RowTransfer() = default;
  /// Returns the rows that arrive, for kernels on the current stream. Does not
  /// block the host. Once.
  virtual TensorList finish() = 0;
};

/// Brings rows of tokens to the experts that they are for, and back.
class TokenExchange {
 public:
  enum class Direction {
    dispatch,  ///< [num_sent, ...] by expert -> [num_received, ...] by expert
    combine,   ///< the way back: [num_received, ...] -> [num_sent, ...]
  };

  virtual ~TokenExchange() = default;
  /// begin_plan and finish_plan in one.
  ExchangePlanPtr plan(const at::Tensor& counts, std::int64_t num_rows) {
    ExchangePlanPtr made = begin_plan(counts, num_rows);
    finish_plan(made);
    return made;
  }
  /// Does not wait for the counts. Only num_sent of the plan is known before
  /// finish_plan.
  ///
  /// @param counts    int32 [experts], on the device: rows for each expert, of
  ///   all experts of the model.
  /// @param num_rows  of the sent tensor: counts' sum, and dropped rows after
  ///   it.
  virtual ExchangePlanPtr begin_plan(
      const at::Tensor& counts,
      std::int64_t num_rows) = 0;
  /// Waits on the host until the counts of all ranks have arrived. On the
  /// thread of begin_plan, and of several plans in their order; does nothing
  /// when it is finished.
  virtual void finish_plan(const ExchangePlanPtr& /*plan*/) {}
  /// Queues a transfer on the current stream or on another, and returns.
  /// Transfers finish in the order in which they were started, on all ranks. A
  /// dispatch finishes a pending plan.
  virtual std::unique_ptr<RowTransfer> start(
      const ExchangePlanPtr& plan,
      Direction direction,
      const TransferInput& input) = 0;
};

/// Every expert is here: rows stay where they are.
class LocalExchange : public TokenExchange {
 public:
  ExchangePlanPtr begin_plan(const at::Tensor& counts, std::int64_t num_rows)
      override;
  std::unique_ptr<RowTransfer> start(
      const ExchangePlanPtr& plan,
      Direction direction,
      const TransferInput& input) override;
};

// For exchanges that only move rows. No graph.

/// Returns the rows that are sent: of tokens, permuted.
TensorList rows_of(
    TokenExchange::Direction direction,
    const TransferInput& input);
/// Returns the delivery of a transfer of `input` when `rows` have arrived: for
/// tokens, sums.
TensorList result_of(
    TokenExchange::Direction direction,
    const TransferInput& input,
    TensorList rows);

/// A transfer of rows. Their gradients are sent in the other direction.
struct RowRoute {
  std::shared_ptr<TokenExchange> exchange;
  ExchangePlanPtr plan;
  TokenExchange::Direction direction = TokenExchange::Direction::dispatch;
  /// See TransferInput.
  std::optional<Permutation> tokens = {};

  /// Returns the input of a transfer `to` its destination: rows, or gradients
  /// of rows.
  /// @param made  all of it exists after this point, for which the transfer
  ///   waits unless something had to be copied. Unset: now.
  TransferInput input(
      TokenExchange::Direction to,
      TensorList rows,
      const at::Tensor& addend = {},
      const std::optional<Event>& made = {}) const;
};

/// Returns the other direction.
inline TokenExchange::Direction back(TokenExchange::Direction direction) {
  return direction == TokenExchange::Direction::dispatch
             ? TokenExchange::Direction::combine
             : TokenExchange::Direction::dispatch;
}

/// Does start and finish in one. The gradients of `rows` are sent back, all of
/// them together. The gradient of `addend` is the gradient of the result.
///
/// @param route   kept by the graph.
/// @param addend  see TransferInput; undefined: none.
/// @param is_unread  as for gated_linear, on all ranks: nothing is sent. Only
///   for rows that become sums of tokens (TransferInput::tokens).
TensorList exchange_rows(
    const RowRoute& route,
    const TensorList& rows,
    const at::Tensor& addend = {},
    bool is_unread = false);

}  // namespace flatshard::nn
