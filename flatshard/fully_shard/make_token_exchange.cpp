#include "flatshard/fully_shard/make_token_exchange.h"

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/fully_shard/copy_fences.h"
#include "flatshard/peer/page_communicator.h"

namespace flatshard {

std::shared_ptr<StreamExchange> make_token_exchange(
    Mesh& mesh,
    std::span<const int> axes,
    const TokenExchangeOptions& options) {
  const auto group =
      mesh.communicator(axes, Purpose::exchange).shared_from_this();
  if (!options.copies) {
    return std::make_shared<CollectiveExchange>(
        group,
        options.num_experts,
        options.exchange);
  }
  const auto fences = copy_fences(mesh, axes);
  const auto hosts = make_page_communicator(
      group,
      {.max_nbytes =
           options.num_experts * static_cast<std::int64_t>(sizeof(int)),
       .timeout = options.timeout});
  watch_exchange(mesh, axes, hosts);
  return std::make_shared<PeerExchange>(
      fences,
      hosts,
      options.num_experts,
      PeerExchangeOptions{
          .window_nbytes = options.window_nbytes,
          .exchange = options.exchange});
}

}  // namespace flatshard
