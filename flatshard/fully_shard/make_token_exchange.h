#pragma once

#include "flatshard/exchange/stream_exchange.h"
#include "flatshard/mesh/mesh.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

namespace flatshard {

struct TokenExchangeOptions {
  std::int64_t num_experts = 0;  ///< of a layer, on all ranks together
  /// Tokens are copied between ranks of one host (PeerExchange). False:
  /// collectives exchange them.
  bool copies = false;
  /// The window of copies; see PeerExchangeOptions.
  std::int64_t window_nbytes = 0;
  /// How long a host waits for the counts of the others, with copies.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  ExchangeOptions exchange;
};

/// Returns the exchange of tokens between the ranks along axes of the mesh, in
/// ascending order, over communicators that the mesh watches. Collective.
/// @throws Error{config} when the experts do not divide by the ranks, or when
///   ranks that copy are on different hosts.
std::shared_ptr<StreamExchange> make_token_exchange(
    Mesh& mesh,
    std::span<const int> axes,
    const TokenExchangeOptions& options);

}  // namespace flatshard
