#include "flatshard/fully_shard/make_token_exchange.h"

#include "flatshard/exchange/collective_exchange.h"
#include "flatshard/exchange/peer_exchange.h"
#include "flatshard/peer/page_communicator.h"
#include "flatshard/peer/peer_communicator.h"

#include <string>
#include <vector>

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
  std::vector<std::string> names;
  for (const int axis : axes) {
    names.push_back(mesh.axis(axis).name);
  }
  const auto watched = [&](std::shared_ptr<Communicator> made) {
    mesh.with_communicators({{names, made, Purpose::exchange}});
    return made;
  };
  const auto fences = mesh.device().is_cuda()
                          ? watched(make_peer_communicator(group, {}))
                          : group;
  const auto hosts = watched(make_page_communicator(
      group,
      {.max_nbytes =
           options.num_experts * static_cast<std::int64_t>(sizeof(int)),
       .timeout = options.timeout}));
  return std::make_shared<PeerExchange>(
      fences,
      hosts,
      options.num_experts,
      PeerExchangeOptions{
          .window_nbytes = options.window_nbytes,
          .exchange = options.exchange});
}

}  // namespace flatshard
