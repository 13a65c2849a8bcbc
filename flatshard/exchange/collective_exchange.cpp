#include "flatshard/exchange/collective_exchange.h"

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"

#include <ATen/ATen.h>

#include <cstring>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

/// The places of each rank's rows, on the side of the tokens and on the side of
/// the experts.
struct CollectivePlan : StreamExchangePlan {
  /// Of what dispatch takes: by expert, so by rank as well.
  std::vector<RowsOfPeer> at_home;
  /// Of what dispatch delivers: by expert, then by the rank they came from.
  std::vector<RowsOfPeer> at_experts;
  at::Tensor arriving;  ///< counts, until it is finished
};

}  // namespace

CollectiveExchange::CollectiveExchange(
    std::shared_ptr<Communicator> group,
    std::int64_t num_experts,
    const ExchangeOptions& options)
    : StreamExchange(std::move(group), num_experts, options),
      host_counts_(host_buffer(
                       2 * num_experts * static_cast<std::int64_t>(sizeof(int)),
                       this->group().device())
                       .view(at::kInt)
                       .view({2, num_experts})) {
  // Connects the pairs of ranks, which would stall the first step.
  plan(
      at::ones(
          {num_experts},
          at::TensorOptions(this->group().device()).dtype(at::kInt)),
      num_experts);
}

c10::intrusive_ptr<StreamExchangePlan> CollectiveExchange::begin(
    const at::Tensor& leaving) {
  if (failed_.exchange(false)) {
    reset();
  }
  const std::int64_t local = experts_per_rank();
  std::vector<RowsOfPeer> equal;
  for (int peer = 0; peer < group().size(); ++peer) {
    equal.push_back({peer, peer * local, local});
  }
  const at::Tensor arriving = at::empty_like(leaving);
  Event counted;
  counted.record(*current_stream(group().device()));
  counted.wait(stream());
  submit([this, leaving, arriving, equal] {
    group().all_to_all(arriving, leaving, equal, equal);
    auto* const host = host_counts_.mutable_data_ptr<int>();
    const auto nbytes = static_cast<std::int64_t>(leaving.nbytes());
    copy_bytes(host, leaving.const_data_ptr(), nbytes, group().device());
    copy_bytes(
        host + num_experts(),
        arriving.const_data_ptr(),
        nbytes,
        group().device());
  });
  auto made = c10::make_intrusive<CollectivePlan>();
  made->arriving = arriving;
  made->known.record(stream());
  return made;
}

void CollectiveExchange::finish(const nn::ExchangePlanPtr& plan) {
  auto* const made = own<CollectivePlan>(plan);
  const at::Tensor arriving = std::exchange(made->arriving, {});
  const int size = group().size();
  const std::int64_t local = experts_per_rank();
  const int* const sent = host_counts_.const_data_ptr<int>();
  const int* const received = sent + num_experts();
  std::int64_t row = 0;
  for (std::int64_t expert = 0; expert < num_experts(); ++expert) {
    made->at_home.push_back(
        {static_cast<int>(expert / local), row, sent[expert]});
    row += sent[expert];
  }
  check_num_rows(row, made->num_sent);
  row = 0;
  for (std::int64_t expert = 0; expert < local; ++expert) {
    for (int peer = 0; peer < size; ++peer) {
      const int rows = received[peer * local + expert];
      made->at_experts.push_back({peer, row, rows});
      row += rows;
    }
  }
  made->num_received = row;
  const at::Tensor by_rank = arriving.view({size, local});
  if (groups_by_rank()) {
    made->groups_per_expert = size;
    made->ends = by_rank.t().reshape({-1}).cumsum(0, at::kInt);
  } else {
    made->ends = by_rank.sum(0).cumsum(0, at::kInt);
  }
}

nn::TransferInput CollectiveExchange::rows_to_send(
    const nn::TransferInput& input) {
  return {.rows = nn::rows_of(Direction::dispatch, input)};
}

std::function<void()> CollectiveExchange::transfer_of_rows(
    const nn::ExchangePlanPtr& plan,
    Direction direction,
    const nn::TensorList& out,
    const nn::TensorList& rows) {
  const auto* const made = own<const CollectivePlan>(plan);
  // The plan lives as long as the graph.
  return
      [this, plan, made, leaves = direction == Direction::dispatch, rows, out] {
        for (std::size_t i = 0; i < rows.size(); ++i) {
          group().all_to_all(
              out[i],
              rows[i],
              leaves ? made->at_experts : made->at_home,
              leaves ? made->at_home : made->at_experts);
        }
      };
}

}  // namespace flatshard
