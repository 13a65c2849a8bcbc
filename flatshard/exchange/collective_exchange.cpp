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
struct Plan : nn::ExchangePlan {
  /// Of what dispatch takes: by expert, so by rank as well.
  std::vector<RowsOfPeer> at_home;
  /// Of what dispatch delivers: by expert, then by the rank they came from.
  std::vector<RowsOfPeer> at_experts;
};

std::vector<std::int64_t> with_rows(const at::Tensor& like, std::int64_t rows) {
  std::vector<std::int64_t> sizes = like.sizes().vec();
  sizes.at(0) = rows;
  return sizes;
}

void check_num_experts(Communicator& group, std::int64_t num_experts) {
  const auto options = at::TensorOptions(group.device()).dtype(at::kLong);
  const at::Tensor all = at::empty({group.size()}, options);
  group.all_gather(all, at::full({1}, num_experts, options));
  const at::Tensor host = all.cpu();
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto theirs = host[rank].item<std::int64_t>();
    FLATSHARD_CHECK(
        theirs == host[0].item<std::int64_t>(),
        config,
        "exchange of tokens: rank {} of the group has layers of {} experts, "
        "rank 0 of {}; give all ranks the same model",
        rank,
        theirs,
        host[0].item<std::int64_t>());
  }
  FLATSHARD_CHECK(
      num_experts > 0 && num_experts % group.size() == 0,
      config,
      "exchange of tokens: {} experts do not divide by {} ranks; expected as "
      "many on each rank",
      num_experts,
      group.size());
}

}  // namespace

class CollectiveExchange::Transfer : public nn::RowTransfer {
 public:
  Transfer(CollectiveExchange& exchange, at::Tensor from, at::Tensor to)
      : exchange_(&exchange), from_(std::move(from)), to_(std::move(to)) {
    done_.record(exchange.stream());
  }

  // Nobody asked for the rows: their memory is under way all the same.
  ~Transfer() override {
    if (exchange_ == nullptr) {
      return;
    }
    try {
      done_.wait(*current_stream(to_.device()));
    } catch (const std::exception&) {
      exchange_->failed_ = true;
    }
  }

  at::Tensor finish() override {
    CollectiveExchange& exchange = *std::exchange(exchange_, nullptr);
    if (exchange.measures_) {
      exchange.timer_->start();
    }
    try {
      done_.wait(*current_stream(to_.device()));
    } catch (const std::exception&) {
      exchange.failed_ = true;
      throw;
    }
    if (exchange.measures_) {
      exchange.timer_->stop();
    }
    // Compute waits, so it may use both again.
    from_.reset();
    return std::move(to_);
  }

 private:
  CollectiveExchange* exchange_;  ///< null: finished
  at::Tensor from_;
  at::Tensor to_;
  Event done_;
};

CollectiveExchange::CollectiveExchange(
    std::shared_ptr<Communicator> group,
    std::int64_t num_experts,
    ExchangeOptions options)
    : group_(std::move(group)),
      num_experts_(num_experts),
      options_(options),
      timer_(make_stream_timer(group_->device())),
      host_counts_(host_buffer(
                       2 * num_experts * static_cast<std::int64_t>(sizeof(int)),
                       group_->device())
                       .view(at::kInt)
                       .view({2, num_experts})) {
  check_num_experts(*group_, num_experts);
  options_.stream.high_priority = true;
  stream_ = make_stream(group_->device(), "exchange", options_.stream);
  // Connects the pairs of ranks, which would stall the first step.
  plan(
      at::ones(
          {num_experts},
          at::TensorOptions(group_->device()).dtype(at::kInt)),
      num_experts);
}

nn::ExchangePlanPtr CollectiveExchange::plan(
    const at::Tensor& counts,
    std::int64_t num_rows) {
  FLATSHARD_CHECK(
      counts.dim() == 1 && counts.size(0) == num_experts_ &&
          counts.scalar_type() == at::kInt,
      usage,
      "exchange of tokens: expected int32 [{}] counts, got {} {}",
      num_experts_,
      c10::toString(counts.scalar_type()),
      c10::str(counts.sizes()));
  if (std::exchange(failed_, false)) {
    stream_->reset();
  }
  const int size = group_->size();
  const std::int64_t local = num_experts_ / size;
  std::vector<RowsOfPeer> equal;
  for (int peer = 0; peer < size; ++peer) {
    equal.push_back({peer, peer * local, local});
  }
  const at::Tensor leaving = counts.contiguous();
  const at::Tensor arriving = at::empty_like(leaving);
  Event counted;
  counted.record(*current_stream(group_->device()));
  counted.wait(*stream_);
  stream_->submit([this, leaving, arriving, equal] {
    group_->all_to_all(arriving, leaving, equal, equal);
    auto* const host = host_counts_.mutable_data_ptr<int>();
    const auto nbytes = static_cast<std::int64_t>(leaving.nbytes());
    copy_bytes(host, leaving.const_data_ptr(), nbytes, group_->device());
    copy_bytes(
        host + num_experts_,
        arriving.const_data_ptr(),
        nbytes,
        group_->device());
  });
  Event known;
  known.record(*stream_);
  try {
    known.synchronize();
  } catch (const std::exception&) {
    failed_ = true;
    throw;
  }

  auto made = c10::make_intrusive<Plan>();
  const int* const sent = host_counts_.const_data_ptr<int>();
  const int* const received = sent + num_experts_;
  std::int64_t row = 0;
  for (std::int64_t expert = 0; expert < num_experts_; ++expert) {
    made->at_home.push_back(
        {static_cast<int>(expert / local), row, sent[expert]});
    row += sent[expert];
  }
  FLATSHARD_CHECK(
      row <= num_rows,
      usage,
      "exchange of tokens: {} rows are counted, but there are {}",
      row,
      num_rows);
  row = 0;
  for (std::int64_t expert = 0; expert < local; ++expert) {
    for (int peer = 0; peer < size; ++peer) {
      const int rows = received[peer * local + expert];
      made->at_experts.push_back({peer, row, rows});
      row += rows;
    }
  }
  made->num_sent = num_rows;
  made->num_received = row;
  const at::Tensor by_rank = arriving.view({size, local});
  if (options_.groups_by_rank) {
    made->groups_per_expert = size;
    made->ends = by_rank.t().reshape({-1}).cumsum(0, at::kInt);
  } else {
    made->ends = by_rank.sum(0).cumsum(0, at::kInt);
  }
  return made;
}

std::unique_ptr<nn::RowTransfer> CollectiveExchange::start(
    const nn::ExchangePlanPtr& plan,
    Way way,
    const at::Tensor& rows) {
  const auto* const made = dynamic_cast<const Plan*>(plan.get());
  FLATSHARD_CHECK(
      made,
      usage,
      "exchange of tokens: expected a plan of this exchange, got another's");
  const bool leaves = way == Way::dispatch;
  const at::Tensor out = at::empty(
      with_rows(rows, leaves ? plan->num_received : plan->num_sent),
      rows.options());
  Event ready;
  ready.record(*current_stream(group_->device()));
  ready.wait(*stream_);
  // The transfer holds the tensors, and the plan lives as long as the graph.
  stream_->submit([this, plan, made, leaves, rows, out] {
    group_->all_to_all(
        out,
        rows,
        leaves ? made->at_experts : made->at_home,
        leaves ? made->at_home : made->at_experts);
  });
  return std::make_unique<Transfer>(*this, rows, out);
}

}  // namespace flatshard
