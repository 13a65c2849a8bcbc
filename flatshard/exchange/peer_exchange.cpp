#include "flatshard/exchange/peer_exchange.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/device/memory.h"
#include "flatshard/moe/permute.h"

namespace flatshard {
namespace {

// Aligns the halves for wide copies.
constexpr std::int64_t kHalfAlignment = 256;

// Aligns the parts for narrow rows.
constexpr std::int64_t kPartAlignment = 4;

std::int64_t nbytes_of_row(const at::Tensor& rows) {
  return c10::multiply_integers(rows.sizes().slice(1)) *
         static_cast<std::int64_t>(rows.element_size());
}

}  // namespace

struct PeerExchange::Plan : StreamExchangePlan {
  RowRuns runs;
  at::Tensor uploaded;   ///< int32: RunTables
  at::Tensor stay_runs;  ///< rows that stay: see nn::row_places
  at::Tensor all_runs;   ///< all rows that arrive: see CopyNarrowRows
  std::optional<nn::RowPlaces> places;  ///< made on the exchange stream
  bool has_begun = false;  ///< see begin_dispatch; until the next transfer
};

PeerExchange::PeerExchange(
    std::shared_ptr<Communicator> group,
    std::shared_ptr<Communicator> hosts,
    std::int64_t num_experts,
    const PeerExchangeOptions& options)
    : StreamExchange(std::move(group), num_experts, options.exchange),
      hosts_(std::move(hosts)),
      grows_(options.window_nbytes == 0),
      counts_(make_stream(
          this->group().device(),
          "counts",
          {.high_priority = true})),
      host_(host_buffer(
                (num_experts + tables().numel()) *
                    static_cast<std::int64_t>(sizeof(int)),
                this->group().device())
                .view(at::kInt)) {
  FLATSHARD_CHECK(
      options.exchange.ranks_per_expert == 1,
      config,
      "exchange of tokens by copies: {} ranks that share an expert are not "
      "supported; exchange by collectives (parallelism.token_exchange)",
      options.exchange.ranks_per_expert);
  FLATSHARD_CHECK(
      hosts_->size() == this->group().size() &&
          hosts_->rank() == this->group().rank() && hosts_->device().is_cpu(),
      usage,
      "exchange of tokens by copies: expected the hosts of '{}', got '{}'",
      this->group().name(),
      hosts_->name());
  if (!grows_) {
    make_windows(options.window_nbytes);
  }
}

std::int64_t PeerExchange::windows_nbytes(std::int64_t window_nbytes) {
  return 2 * round_up(window_nbytes, kHalfAlignment);
}

void PeerExchange::make_windows(std::int64_t nbytes) {
  windows_ = PeerMemory::create(group(), windows_nbytes(nbytes));
  half_nbytes_ = windows_->local().numel() / 2;
  window_nbytes_ = nbytes;
  std::vector<std::int64_t> addresses;
  for (int rank = 0; rank < windows_->size(); ++rank) {
    addresses.push_back(
        reinterpret_cast<std::int64_t>(windows_->of(rank).data_ptr()));
  }
  addresses_ = at::tensor(addresses, at::kLong).to(group().device());
}

void PeerExchange::begin_dispatch(
    const nn::ExchangePlanPtr& plan,
    nn::TransferInput& input) {
  const at::Tensor& tokens = input.rows[0];
  if (!takes_tokens(tokens)) {
    StreamExchange::begin_dispatch(plan, input);
    return;
  }
  auto* const made = own<Plan>(plan);
  wait_for_counts(*made);
  const int* const counts = host_.const_data_ptr<int>();
  const int* const own_experts = counts + group().rank() * experts_per_rank();
  const int* const later_experts = own_experts + experts_per_rank();
  const auto stay_begin = std::reduce(counts, own_experts, std::int64_t{0});
  const auto stay_end = std::reduce(own_experts, later_experts, stay_begin);
  const auto end = std::reduce(later_experts, counts + num_experts(), stay_end);
  const bool fits = windows_ && end * nbytes_of_row(tokens) <= window_nbytes_;
  if (!fits || end > made->num_sent) {
    return;  // the windows grow, or the plan is refused
  }
  made->has_begun = true;
  Event ready;
  ready.record(*current_stream(group().device()));
  ready.wait(stream());
  stream().submit(
      [this, tokens, permutation = *input.tokens, stay_begin, stay_end, end] {
        // The half of this dispatch. Peers have read its old content: the fence
        // of the previous transfer came first on this stream.
        const at::Tensor window = rows_in_window(1 - half_, end, tokens);
        for (const auto& [first, last] :
             {std::pair(std::int64_t{0}, stay_begin),
              std::pair(stay_end, end)}) {
          nn::permute_rows_into(
              tokens,
              permutation.part(first, last),
              {},
              window.slice(0, first, last),
              {});
        }
      });
}

void PeerExchange::reserve(
    const nn::ExchangePlanPtr& plan,
    const nn::TransferInput& input) {
  auto* const made = own<Plan>(plan);
  const std::int64_t num_rows = made->runs.most_routed();
  const bool has_begun = std::exchange(made->has_begun, false);
  std::int64_t needed = 0;
  for (const at::Tensor& tensor : input.rows) {
    if (!tensor.defined()) {
      continue;
    }
    const std::int64_t row = nbytes_of_row(tensor);
    FLATSHARD_CHECK(
        grows_ || num_rows * row <= window_nbytes_,
        config,
        "exchange of tokens by copies: a rank has {} rows of {} bytes, and "
        "windows of {} bytes; make them larger, or exchange by collectives "
        "(parallelism.token_exchange)",
        num_rows,
        row,
        window_nbytes_);
    needed = round_up(needed, kPartAlignment) + num_rows * row;
  }
  // The size is the same on all ranks: each uses the largest number of rows
  // over all ranks. Windows that peers still read stay until every rank has
  // reached this point.
  if (grows_ && needed > window_nbytes_) {
    Event idle;
    idle.record(stream());
    idle.synchronize();
    make_windows(needed + needed / 4);
    return;
  }
  made->has_begun = has_begun;
}

c10::intrusive_ptr<StreamExchangePlan> PeerExchange::make_plan(
    const at::Tensor& counts) {
  const RunTables tables = this->tables();
  auto made = c10::make_intrusive<Plan>();
  made->groups_per_expert = groups_by_rank() ? group().size() : 1;
  made->uploaded = at::empty({tables.numel()}, counts.options());
  const std::vector<at::Tensor> parts = made->uploaded.split_with_sizes(
      {tables.num_ends,
       2 * tables.staying_columns,
       2 * tables.arriving_columns});
  made->ends = parts[0];
  made->stay_runs = parts[1].view({2, tables.staying_columns});
  made->all_runs = parts[2].view({2, tables.arriving_columns});
  return made;
}

void PeerExchange::send_counts(StreamExchangePlan& plan) {
  FLATSHARD_CHECK(
      !failed_,
      comm,
      "exchange of tokens by copies: a transfer has failed, and the ranks may "
      "be in different places; all of them call restart() first");
  plan.counted.wait(*counts_);
  const at::Tensor mine = host_.narrow(0, 0, num_experts());
  counts_->submit([mine, counts = plan.counts] {
    copy_bytes(
        mine.mutable_data_ptr(),
        counts.const_data_ptr(),
        static_cast<std::int64_t>(counts.nbytes()),
        counts.device());
  });
  plan.known.record(*counts_);
}

void PeerExchange::finish(const nn::ExchangePlanPtr& plan) {
  auto* const made = own<Plan>(plan);
  const at::Device device = group().device();
  const at::Tensor all = at::empty({group().size(), num_experts()}, at::kInt);
  try {
    hosts_->all_gather(all, host_.narrow(0, 0, num_experts()));
  } catch (const std::exception&) {
    failed_ = true;
    throw;
  }

  made->runs = RowRuns(
      {all.const_data_ptr<int>(), static_cast<std::size_t>(all.numel())},
      group().size(),
      group().rank());
  check_num_rows(made->runs.num_routed(), made->num_sent);
  made->num_received = made->runs.num_arriving();
  const RunTables tables = this->tables();
  int* const from = host_.mutable_data_ptr<int>() + num_experts();
  made->runs.write(tables, {from, static_cast<std::size_t>(tables.numel())});
  counts_->submit([to = made->uploaded, from] {
    copy_bytes(
        to.mutable_data_ptr(),
        from,
        static_cast<std::int64_t>(to.nbytes()),
        to.device());
  });
  Event uploaded;
  uploaded.record(*counts_);
  uploaded.wait(*current_stream(device));
  uploaded.wait(stream());
}

void PeerExchange::restart() {
  counts_->reset();
  StreamExchange::restart();
  half_ = 0;
  hosts_->restart();
}

RunTables PeerExchange::tables() {
  return {group().size(), experts_per_rank(), groups_by_rank()};
}

std::vector<std::vector<PeerExchange::Part>> PeerExchange::parts_by_fence(
    const Plan& plan,
    const nn::TensorList& at_home,
    const nn::TensorList& at_experts,
    bool of_tokens) const {
  std::vector<std::vector<Part>> fences(1);
  std::int64_t in_window = 0;
  for (std::size_t i = 0; i < at_experts.size(); ++i) {
    const std::int64_t row = nbytes_of_row(at_experts[i]);
    if (in_window + plan.runs.most_routed() * row > window_nbytes_) {
      fences.emplace_back();
      in_window = 0;
    }
    fences.back().push_back(
        {.row = row,
         .at_home = static_cast<char*>(at_home[i].data_ptr()),
         .at_experts = static_cast<char*>(at_experts[i].data_ptr()),
         .in_window = in_window,
         .of_tokens = of_tokens && i == 0,
         .is_narrow = !(of_tokens && i == 0) &&
                      are_narrow(row, at_experts[i].element_size())});
    in_window += round_up(plan.runs.most_routed() * row, kPartAlignment);
  }
  return fences;
}

std::function<void()> PeerExchange::transfer(
    const nn::ExchangePlanPtr& plan,
    Direction direction,
    const nn::TensorList& out,
    const nn::TransferInput& input) {
  auto* const made = own<Plan>(plan);
  const bool has_begun = std::exchange(made->has_begun, false);
  if (input.rows.empty()) {
    return [] {};
  }
  // The plan exists as long as the graph.
  return [this, plan, made, direction, out, input, has_begun] {
    if (input.tokens && !made->places) {
      made->places = nn::row_places(
          *input.tokens,
          made->stay_runs,
          made->runs.num_routed());
    }
    const bool leaves = direction == Direction::dispatch;
    const auto fences = parts_by_fence(
        *made,
        leaves ? input.rows : out,
        leaves ? out : input.rows,
        input.tokens.has_value());
    for (const std::vector<Part>& parts : fences) {
      half_ = 1 - half_;
      if (leaves) {
        dispatch(*made, parts, input, out[0], has_begun);
      } else {
        combine(*made, parts, input, out[0]);
      }
    }
  };
}

void PeerExchange::dispatch(
    const Plan& plan,
    const std::vector<Part>& parts,
    const nn::TransferInput& input,
    const at::Tensor& arrived,
    bool has_begun) {
  if (parts[0].of_tokens) {
    const std::int64_t first = has_begun ? plan.runs.stay_begin() : 0;
    const std::int64_t last =
        has_begun ? plan.runs.stay_end() : plan.runs.num_routed();
    nn::permute_rows_into(
        input.rows[0],
        input.tokens->part(first, last),
        plan.places->of_rows.slice(0, first, last),
        rows_in_window(half_, plan.runs.num_routed(), arrived),
        arrived);
  }
  copy(home_copies(plan, parts, /*leaves=*/true));
  group().fence();
  copy(expert_copies(plan, parts, /*arrive=*/true));
}

void PeerExchange::combine(
    const Plan& plan,
    const std::vector<Part>& parts,
    const nn::TransferInput& input,
    const at::Tensor& sums) {
  copy(expert_copies(plan, parts, /*arrive=*/false));
  group().fence();
  copy(home_copies(plan, parts, /*leaves=*/false));
  if (parts[0].of_tokens) {
    nn::sum_rows_from(
        rows_in_window(half_, plan.runs.num_routed(), input.rows[0]),
        input.rows[0],
        *plan.places,
        input.addend,
        sums);
  }
}

std::vector<BytesCopy> PeerExchange::expert_copies(
    const Plan& plan,
    const std::vector<Part>& parts,
    bool arrive) const {
  for (const Part& part : parts) {
    if (part.is_narrow) {
      copy_narrow_rows(
          {.windows = addresses_.const_data_ptr<std::int64_t>(),
           .runs = plan.all_runs.const_data_ptr<std::int32_t>(),
           .here = reinterpret_cast<std::uint32_t*>(part.at_experts),
           .in_window = half_ * half_nbytes_ + part.in_window,
           .num_rows = plan.num_received,
           .num_ranks = windows_->size(),
           .num_runs = static_cast<int>(plan.all_runs.size(1) - 1),
           .words = static_cast<int>(part.row / 4),
           .gathers = arrive},
          addresses_.device());
    }
  }
  // Each rank starts with the next rank, so that no two read from one peer.
  const int rank = windows_->rank();
  std::vector<BytesCopy> copies;
  for (int i = 1; i <= windows_->size(); ++i) {
    const int peer = (rank + i) % windows_->size();
    for (const Part& part : parts) {
      if (part.is_narrow || (peer == rank && part.of_tokens)) {
        continue;
      }
      char* const rows = peer == rank ? part.at_home : window(peer, part);
      for (const RowRuns::Run& run : plan.runs.of(peer)) {
        char* const there = rows + run.at_home * part.row;
        char* const here = part.at_experts + run.at_experts * part.row;
        copies.push_back(
            {.to = arrive ? here : there,
             .from = arrive ? there : here,
             .nbytes = run.rows * part.row});
      }
    }
  }
  return copies;
}

std::vector<BytesCopy> PeerExchange::home_copies(
    const Plan& plan,
    const std::vector<Part>& parts,
    bool leaves) const {
  std::vector<BytesCopy> copies;
  for (const Part& part : parts) {
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      char* const there = window(windows_->rank(), part) + begin * part.row;
      char* const here = part.at_home + begin * part.row;
      copies.push_back(
          {.to = leaves ? there : here,
           .from = leaves ? here : there,
           .nbytes = (end - begin) * part.row});
    };
    if (part.of_tokens) {
      continue;
    }
    if (part.is_narrow) {
      add(0, plan.runs.num_routed());
    } else {
      add(0, plan.runs.stay_begin());
      add(plan.runs.stay_end(), plan.runs.num_routed());
    }
  }
  return copies;
}

at::Tensor PeerExchange::rows_in_window(
    int half,
    std::int64_t num_rows,
    const at::Tensor& like) const {
  return windows_->local()
      .narrow(0, half * half_nbytes_, num_rows * nbytes_of_row(like))
      .view(like.scalar_type())
      .view({num_rows, like.size(1)});
}

void PeerExchange::copy(const std::vector<BytesCopy>& copies) const {
  copy_bytes(copies, windows_->local().device());
}

char* PeerExchange::window(int rank, const Part& part) const {
  return static_cast<char*>(windows_->of(rank).mutable_data_ptr()) +
         half_ * half_nbytes_ + part.in_window;
}

}  // namespace flatshard
