#include "flatshard/exchange/stream_exchange.h"

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

namespace flatshard {
namespace {

using Direction = nn::TokenExchange::Direction;

void keep(const at::Tensor& tensor) {
  if (tensor.defined()) {
    keep_for_current_stream(tensor);
  }
}

// Allocates the tensors that a transfer of `input` fills.
nn::TensorList room_for(
    const nn::ExchangePlan& plan,
    Direction direction,
    const nn::TransferInput& input) {
  const bool leaves = direction == Direction::dispatch;
  const std::int64_t num_rows = leaves ? plan.num_received : plan.num_sent;
  nn::TensorList room;
  for (const at::Tensor& tensor : input.rows) {
    if (!tensor.defined()) {
      room.emplace_back();
      continue;
    }
    const bool is_of_tokens = room.empty() && input.tokens;
    const std::int64_t expected = !leaves        ? plan.num_received
                                  : is_of_tokens ? input.tokens->tokens()
                                                 : plan.num_sent;
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    FLATSHARD_CHECK(
        !sizes.empty() && sizes[0] == expected,
        usage,
        "exchange of tokens: expected {} rows, got {}",
        expected,
        c10::str(tensor.sizes()));
    sizes[0] = num_rows;
    if (is_of_tokens && !leaves) {
      sizes.at(0) = input.tokens->tokens();
      if (input.addend.defined()) {
        sizes = input.addend.sizes().vec();
      }
    }
    room.push_back(at::empty(sizes, tensor.options()));
  }
  return room;
}

void check_num_experts(
    Communicator& group,
    std::int64_t num_experts,
    std::int64_t ranks_per_expert) {
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
      ranks_per_expert > 0 && group.size() % ranks_per_expert == 0,
      config,
      "exchange of tokens: expected a divisor of {} ranks for those that share "
      "an expert, got {}",
      group.size(),
      ranks_per_expert);
  const std::int64_t ranks = group.size() / ranks_per_expert;
  FLATSHARD_CHECK(
      num_experts > 0 && num_experts % ranks == 0,
      config,
      "exchange of tokens: {} experts do not divide by {} ranks; expected as "
      "many on each rank",
      num_experts,
      ranks);
}

}  // namespace

class StreamExchange::Transfer : public nn::RowTransfer {
 public:
  Transfer(
      StreamExchange& exchange,
      nn::TransferInput from,
      std::shared_ptr<nn::TensorList> to)
      : exchange_(&exchange), from_(std::move(from)), to_(std::move(to)) {
    done_.record(exchange.stream());
  }

  // The rows were never received, but their memory may still be in use.
  ~Transfer() override {
    if (exchange_ == nullptr) {
      return;
    }
    try {
      done_.wait(*current_stream(exchange_->group().device()));
    } catch (const std::exception&) {
      exchange_->failed_ = true;
    }
  }

  nn::TensorList finish() override {
    std::exchange(exchange_, nullptr)->await(done_);
    // Compute waits, so it may use both again.
    from_ = {};
    for (const at::Tensor& rows : *to_) {
      keep(rows);
    }
    return std::move(*to_);
  }

 private:
  StreamExchange* exchange_;  ///< null: finished
  nn::TransferInput from_;
  std::shared_ptr<nn::TensorList> to_;
  Event done_;
};

StreamExchange::StreamExchange(
    std::shared_ptr<Communicator> group,
    std::int64_t num_experts,
    const ExchangeOptions& options)
    : group_(std::move(group)),
      num_experts_(num_experts),
      options_(options),
      timer_(make_stream_timer(group_->device())) {
  check_num_experts(*group_, num_experts, options.ranks_per_expert);
  options_.stream.high_priority = true;
  stream_ = make_stream(group_->device(), "exchange", options_.stream);
}

nn::ExchangePlanPtr StreamExchange::begin_plan(
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
  const at::Tensor leaving = counts.contiguous();
  auto made = make_plan(leaving);
  made->counts = leaving;
  made->num_sent = num_rows;
  made->counted.record(*current_stream(group_->device()));
  // Else the host needs the counts of the plan before. Then these leave when
  // the host waits for them.
  if (num_begun_ == finished_) {
    begin(*made);
  }
  return made;
}

void StreamExchange::begin(StreamExchangePlan& plan) {
  send_counts(plan);
  plan.number = ++num_begun_;
}

void StreamExchange::finish_plan(const nn::ExchangePlanPtr& plan) {
  auto* const made = own<StreamExchangePlan>(plan);
  if (made->is_finished) {
    return;
  }
  wait_for_counts(*made);
  finish(plan);
  made->counts = at::Tensor();
  made->is_finished = true;
  finished_ = made->number;
}

void StreamExchange::wait_for_counts(StreamExchangePlan& plan) {
  if (plan.number == 0) {
    begin(plan);
  }
  FLATSHARD_CHECK(
      plan.number == num_begun_,
      usage,
      "exchange of tokens: a plan is finished after a later one; expected the "
      "order in which they were started");
  try {
    plan.known.synchronize();
  } catch (const std::exception&) {
    failed_ = true;
    throw;
  }
}

void StreamExchange::check_num_rows(
    std::int64_t counted,
    std::int64_t num_rows) {
  FLATSHARD_CHECK(
      counted <= num_rows,
      usage,
      "exchange of tokens: {} rows are counted, but there are {}",
      counted,
      num_rows);
}

void StreamExchange::submit(std::function<void()> work) {
  Communicator* const group = group_.get();
  queue_collectives(*stream_, {&group, 1}, std::move(work));
}

void StreamExchange::restart() {
  stream_->reset();
  failed_ = false;
  finished_ = num_begun_;  // pending plans stay pending
}

void StreamExchange::await(const Event& event) {
  if (measures_) {
    timer_->start();
  }
  try {
    event.wait(*current_stream(group_->device()));
  } catch (const std::exception&) {
    failed_ = true;
    throw;
  }
  if (measures_) {
    timer_->stop();
  }
}

void StreamExchange::begin_dispatch(
    const nn::ExchangePlanPtr& /*plan*/,
    nn::TransferInput& input) {
  input = {.rows = nn::rows_of(Direction::dispatch, input)};
}

std::function<void()> StreamExchange::work_of(
    const nn::ExchangePlanPtr& plan,
    Direction direction,
    const nn::TensorList& out,
    const nn::TransferInput& input) {
  const auto defined = [](nn::TensorList tensors) {
    std::erase_if(tensors, [](const auto& t) { return !t.defined(); });
    return tensors;
  };
  nn::TransferInput all = input;
  all.rows = defined(std::move(all.rows));
  if (!all.tokens || takes_tokens(all.rows[0])) {
    return transfer(plan, direction, defined(out), all);
  }
  return [this, plan, direction, out = defined(out), all] {
    nn::TensorList arrived = out;
    if (direction == Direction::combine) {
      arrived[0] = at::empty(
          {plan->num_sent, all.rows[0].size(1)},
          all.rows[0].options());
    }
    transfer(plan, direction, arrived, {.rows = nn::rows_of(direction, all)})();
    if (direction == Direction::combine) {
      out[0].copy_(nn::result_of(direction, all, arrived)[0]);
    }
  };
}

std::unique_ptr<nn::RowTransfer> StreamExchange::start(
    const nn::ExchangePlanPtr& plan,
    Direction direction,
    const nn::TransferInput& input) {
  nn::TransferInput rows = input;
  if (direction == Direction::dispatch && input.tokens && !input.after &&
      !own<const StreamExchangePlan>(plan)->is_finished) {
    begin_dispatch(plan, rows);
  }
  finish_plan(plan);
  reserve(plan, rows);
  const auto out = std::make_shared<nn::TensorList>();
  std::function<void()> work;
  Event ready;
  if (input.after) {
    ready = *input.after;
    // Allocates on the stream, because compute still uses memory it freed.
    work = [this, plan, direction, rows, out] {
      for (const at::Tensor& sent : rows.rows) {
        keep(sent);
      }
      keep(rows.addend);
      *out = room_for(*plan, direction, rows);
      work_of(plan, direction, *out, rows)();
    };
  } else {
    *out = room_for(*plan, direction, rows);
    work = work_of(plan, direction, *out, rows);
    ready.record(*current_stream(group_->device()));
  }
  ready.wait(*stream_);
  try {
    submit(std::move(work));
  } catch (const std::exception&) {
    failed_ = true;
    throw;
  }
  if (input.after && direction == Direction::combine) {
    // These rows were made only for the transfer. Dispatched rows may be in
    // memory of a graph, and replays overwrite it unless it is referenced.
    rows = {};
  }
  return std::make_unique<Transfer>(*this, std::move(rows), out);
}

}  // namespace flatshard
