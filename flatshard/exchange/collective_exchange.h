#pragma once

#include "flatshard/exchange/stream_exchange.h"

namespace flatshard {

/// Exchanges tokens by all-to-all.
class CollectiveExchange : public StreamExchange {
 public:
  /// Collective: connects the ranks.
  ///
  /// @param group        for nothing else; outlives this object.
  /// @param num_experts  of a layer, on all ranks together.
  /// @throws Error{config} when they do not divide by the ranks that each have
  ///   others.
  CollectiveExchange(
      std::shared_ptr<Communicator> group,
      std::int64_t num_experts,
      const ExchangeOptions& options = {});

 protected:
  c10::intrusive_ptr<StreamExchangePlan> make_plan(
      const at::Tensor& counts) override;
  void send_counts(StreamExchangePlan& plan) override;
  void finish(const nn::ExchangePlanPtr& plan) override;
  std::function<void()> transfer(
      const nn::ExchangePlanPtr& plan,
      Direction direction,
      const nn::TensorList& out,
      const nn::TransferInput& input) override;

 private:
  /// int32 [experts + ranks * experts here], pinned with a GPU: counts that
  /// leave, then counts that arrive.
  at::Tensor host_counts_;
};

}  // namespace flatshard
