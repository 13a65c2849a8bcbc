#pragma once

#include "flatshard/moe/token_exchange.h"
#include "flatshard/nn/visit.h"

#include "flatshard/core/error.h"

#include <memory>

namespace flatshard::nn {

/// The forward of one block for one microbatch, in pieces between which rows of
/// tokens are sent to their experts and back: a block gives one to a schedule
/// that runs each piece, and its backward, by itself. It remembers what the
/// forward decided (routing, exchange plan), so that the recompute of a piece
/// does not decide again.
///
/// A dense block is `attend` alone, with no rows.
class BlockNodes {
 public:
  virtual ~BlockNodes() = default;

  struct Attended {
    /// What is dispatched: tokens or rows by expert, as `send` takes them, and
    /// what goes with each row. Empty for a dense block.
    TensorList rows;
    /// What the rows that come back are added to; of a dense block the result.
    at::Tensor residual;
    /// What shared experts read; undefined: there are none.
    at::Tensor shared;
  };
  /// Norm, attention, router.
  virtual Attended attend(const at::Tensor& tokens) = 0;
  /// The host waits until it is known where rows go: behind `attend`, before
  /// the first `send`. What is queued in between runs meanwhile.
  virtual void finish_plan() {}
  /// @param rows  as dispatch delivered Attended::rows.
  virtual at::Tensor experts(const TensorList& rows) = 0;
  /// @param x  Attended::shared
  /// @return   the residual with the shared experts' result, for `merge`.
  virtual at::Tensor shared_experts(
      [[maybe_unused]] const at::Tensor& x,
      const at::Tensor& residual) {
    return residual;
  }
  /// @param rows  as `send` brought back those of `experts`.
  /// @return the block's result. No weights are read.
  virtual at::Tensor merge(
      const at::Tensor& rows,
      const at::Tensor& residual) = 0;
  /// Takes rows, or their gradients, one way, as nn::TokenExchange::transfer.
  /// No graph. Called from work of the exchange stream
  /// (nn::TokenExchange::queue).
  /// @param residual  of the forward's combine, and else undefined: what
  ///   `merge` is given. A block may add it here already.
  virtual TensorList send(
      TokenExchange::Direction direction,
      const TensorList& rows,
      const at::Tensor& residual) = 0;
};

}  // namespace flatshard::nn
