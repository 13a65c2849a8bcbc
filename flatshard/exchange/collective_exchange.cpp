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
  /// The rows that dispatch sends: by expert, for each part of their width.
  std::vector<RowsOfPeer> at_home;
  /// The rows that combine delivers, before the parts are added up: part i of
  /// the width has the rows [i * num_sent, (i + 1) * num_sent).
  std::vector<RowsOfPeer> coming_home;
  /// The rows that dispatch delivers: by expert, then by the rank they came
  /// from.
  std::vector<RowsOfPeer> at_experts;
  at::Tensor arriving;  ///< counts, until it is finished
};

}  // namespace

CollectiveExchange::CollectiveExchange(
    std::shared_ptr<Communicator> group,
    std::int64_t num_experts,
    const ExchangeOptions& options)
    : StreamExchange(std::move(group), num_experts, options),
      host_counts_(
          host_buffer(
              (num_experts + this->group().size() * experts_per_rank()) *
                  static_cast<std::int64_t>(sizeof(int)),
              this->group().device())
              .view(at::kInt)) {
  // Connects the pairs of ranks, so that the first step does not stall.
  plan(
      at::ones(
          {num_experts},
          at::TensorOptions(this->group().device()).dtype(at::kInt)),
      num_experts);
}

c10::intrusive_ptr<StreamExchangePlan> CollectiveExchange::make_plan(
    const at::Tensor& counts) {
  auto made = c10::make_intrusive<CollectivePlan>();
  made->arriving =
      at::empty({group().size() * experts_per_rank()}, counts.options());
  return made;
}

void CollectiveExchange::send_counts(StreamExchangePlan& plan) {
  if (failed_.exchange(false)) {
    reset();
  }
  const std::int64_t local = experts_per_rank();
  std::vector<RowsOfPeer> sent;
  std::vector<RowsOfPeer> received;
  for (int peer = 0; peer < group().size(); ++peer) {
    sent.push_back({peer, peer % ranks_per_part() * local, local});
    received.push_back({peer, peer * local, local});
  }
  plan.counted.wait(stream());
  submit([this,
          leaving = plan.counts,
          arriving = static_cast<CollectivePlan&>(plan).arriving,
          sent,
          received] {
    group().all_to_all(arriving, leaving, received, sent);
    auto* host = host_counts_.mutable_data_ptr<int>();
    for (const at::Tensor& counts : {leaving, arriving}) {
      copy_bytes(
          host,
          counts.const_data_ptr(),
          static_cast<std::int64_t>(counts.nbytes()),
          group().device());
      host += counts.numel();
    }
  });
  plan.known.record(stream());
}

void CollectiveExchange::finish(const nn::ExchangePlanPtr& plan) {
  auto* const made = own<CollectivePlan>(plan);
  const at::Tensor arriving = std::exchange(made->arriving, {});
  const int size = group().size();
  const std::int64_t local = experts_per_rank();
  const int* const sent = host_counts_.const_data_ptr<int>();
  const int* const received = sent + num_experts();
  std::int64_t row = 0;
  for (std::int64_t part = 0; part < ranks_per_expert(); ++part) {
    row = 0;
    for (std::int64_t expert = 0; expert < num_experts(); ++expert) {
      const std::int64_t peer = part * ranks_per_part() + expert / local;
      made->at_home.push_back({static_cast<int>(peer), row, sent[expert]});
      made->coming_home.push_back(
          {static_cast<int>(peer), part * made->num_sent + row, sent[expert]});
      row += sent[expert];
    }
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

std::function<void()> CollectiveExchange::transfer(
    const nn::ExchangePlanPtr& plan,
    Direction direction,
    const nn::TensorList& out,
    const nn::TransferInput& input) {
  const auto* const made = own<const CollectivePlan>(plan);
  // The plan exists as long as the graph.
  return [this,
          plan,
          made,
          leaves = direction == Direction::dispatch,
          rows = input.rows,
          out] {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (leaves) {
        group().all_to_all(out[i], rows[i], made->at_experts, made->at_home);
        continue;
      }
      const std::int64_t parts = ranks_per_expert();
      std::vector<std::int64_t> sizes = out[i].sizes().vec();
      sizes[0] *= parts;
      const at::Tensor arrived =
          parts == 1 ? out[i] : at::empty(sizes, out[i].options());
      group().all_to_all(arrived, rows[i], made->coming_home, made->at_experts);
      if (parts > 1) {
        at::Tensor sum = out[i];
        at::sum_out(sum, arrived.unflatten(0, {parts, sum.size(0)}), 0);
      }
    }
  };
}

}  // namespace flatshard
