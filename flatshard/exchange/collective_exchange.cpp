#include "flatshard/exchange/collective_exchange.h"

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"

#include <ATen/ATen.h>

#include <cstring>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

/// Whose rows are where, on either side.
struct CollectivePlan : nn::ExchangePlan {
  /// Of what dispatch takes: by expert, so by rank as well.
  std::vector<RowsOfPeer> at_home;
  /// Of what dispatch delivers: by expert, then by the rank they came from.
  std::vector<RowsOfPeer> at_experts;

  // Until it is finished.
  std::int64_t number = 0;
  Event known;  ///< the counts of both ways are on the host
  at::Tensor arriving;
};

CollectivePlan* own(const nn::ExchangePlanPtr& plan) {
  auto* const made = dynamic_cast<CollectivePlan*>(plan.get());
  FLATSHARD_CHECK(
      made,
      usage,
      "exchange of tokens: expected a plan of this exchange, got another's");
  return made;
}

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

nn::ExchangePlanPtr CollectiveExchange::begin_plan(
    const at::Tensor& counts,
    std::int64_t num_rows) {
  check_counts(counts);
  if (failed_.exchange(false)) {
    reset();
  }
  const std::int64_t local = experts_per_rank();
  std::vector<RowsOfPeer> equal;
  for (int peer = 0; peer < group().size(); ++peer) {
    equal.push_back({peer, peer * local, local});
  }
  const at::Tensor leaving = counts.contiguous();
  const at::Tensor arriving = at::empty_like(leaving);
  Event counted;
  counted.record(*current_stream(group().device()));
  counted.wait(stream());
  stream().submit([this, leaving, arriving, equal] {
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
  made->number = ++num_begun_;
  made->num_sent = num_rows;
  made->arriving = arriving;
  made->known.record(stream());
  return made;
}

void CollectiveExchange::finish_plan(const nn::ExchangePlanPtr& plan) {
  CollectivePlan* const made = own(plan);
  if (!made->arriving.defined()) {
    return;
  }
  check_is_last(made->number, num_begun_);
  try {
    made->known.synchronize();
  } catch (const std::exception&) {
    failed_ = true;
    throw;
  }
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
  FLATSHARD_CHECK(
      row <= made->num_sent,
      usage,
      "exchange of tokens: {} rows are counted, but there are {}",
      row,
      made->num_sent);
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

std::function<void()> CollectiveExchange::travel(
    const nn::ExchangePlanPtr& plan,
    Way way,
    const at::Tensor& out,
    const at::Tensor& rows) {
  const CollectivePlan* const made = own(plan);
  // The plan lives as long as the graph.
  return [this, plan, made, leaves = way == Way::dispatch, rows, out] {
    group().all_to_all(
        out,
        rows,
        leaves ? made->at_experts : made->at_home,
        leaves ? made->at_home : made->at_experts);
  };
}

}  // namespace flatshard
