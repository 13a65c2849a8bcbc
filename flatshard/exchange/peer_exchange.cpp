#include "flatshard/exchange/peer_exchange.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"

namespace flatshard {
namespace {

// So that halves begin where wide copies can.
constexpr std::int64_t kHalfAlignment = 256;

std::int64_t aligned(std::int64_t nbytes) {
  return (nbytes + kHalfAlignment - 1) / kHalfAlignment * kHalfAlignment;
}

std::int64_t nbytes_of_row(const at::Tensor& rows) {
  return c10::multiply_integers(rows.sizes().slice(1)) *
         static_cast<std::int64_t>(rows.element_size());
}

}  // namespace

/// Rows of one expert here that one rank has routed.
struct PeerExchange::Run {
  std::int64_t at_home = 0;     ///< first row among those of that rank
  std::int64_t at_experts = 0;  ///< first row among those that arrive here
  std::int64_t rows = 0;
};

struct PeerExchange::Plan : StreamExchangePlan {
  std::vector<std::vector<Run>> runs;  ///< by rank, then by expert here
  std::int64_t num_counted = 0;        ///< rows that leave this rank or stay
  std::int64_t most_counted = 0;       ///< the largest of all ranks
  // Of this rank's own rows, those for its own experts.
  std::int64_t stay_begin = 0;
  std::int64_t stay_end = 0;
};

PeerExchange::PeerExchange(
    std::shared_ptr<Communicator> group,
    std::shared_ptr<Communicator> hosts,
    std::int64_t num_experts,
    const PeerExchangeOptions& options)
    : StreamExchange(std::move(group), num_experts, options.exchange),
      hosts_(std::move(hosts)),
      window_nbytes_(options.window_nbytes),
      half_nbytes_(aligned(options.window_nbytes)),
      windows_(PeerMemory::create(this->group(), 2 * half_nbytes_)),
      counts_(make_stream(
          this->group().device(),
          "counts",
          {.high_priority = true})),
      host_(host_buffer(
                2 * num_experts * static_cast<std::int64_t>(sizeof(int)),
                this->group().device())
                .view(at::kInt)
                .view({2, num_experts})) {
  FLATSHARD_CHECK(
      hosts_->size() == this->group().size() &&
          hosts_->rank() == this->group().rank() && hosts_->device().is_cpu(),
      usage,
      "exchange of tokens by copies: expected the hosts of '{}', got '{}'",
      this->group().name(),
      hosts_->name());
}

c10::intrusive_ptr<StreamExchangePlan> PeerExchange::begin(
    const at::Tensor& counts) {
  FLATSHARD_CHECK(
      !failed_,
      comm,
      "exchange of tokens by copies: a transfer has failed, and the ranks may "
      "be in different places; all of them call restart() first");
  const at::Device device = group().device();
  const std::int64_t groups_per_expert = groups_by_rank() ? group().size() : 1;
  auto made = c10::make_intrusive<Plan>();
  made->groups_per_expert = groups_per_expert;
  // Before the event: compute may still use the memory that it gets.
  made->ends =
      at::empty({experts_per_rank() * groups_per_expert}, counts.options());
  Event counted;
  counted.record(*current_stream(device));
  counted.wait(*counts_);
  const at::Tensor mine = host_[0];
  counts_->submit([mine, counts] {
    copy_bytes(
        mine.mutable_data_ptr(),
        counts.const_data_ptr(),
        static_cast<std::int64_t>(counts.nbytes()),
        counts.device());
  });
  made->known.record(*counts_);
  return made;
}

void PeerExchange::finish(const nn::ExchangePlanPtr& plan) {
  auto* const made = own<Plan>(plan);
  const at::Device device = group().device();
  const int size = group().size();
  const std::int64_t local = experts_per_rank();
  const at::Tensor all = at::empty({size, num_experts()}, at::kInt);
  try {
    hosts_->all_gather(all, host_[0]);
  } catch (const std::exception&) {
    failed_ = true;
    throw;
  }

  made->runs.resize(size);
  const auto first = static_cast<std::int64_t>(group().rank()) * local;
  for (int rank = 0; rank < size; ++rank) {
    const int* const theirs = all[rank].const_data_ptr<int>();
    std::int64_t row = 0;
    for (std::int64_t expert = 0; expert < num_experts(); ++expert) {
      if (expert >= first && expert < first + local) {
        made->runs[rank].push_back({.at_home = row, .rows = theirs[expert]});
      }
      row += theirs[expert];
    }
    made->most_counted = std::max(made->most_counted, row);
    if (rank == group().rank()) {
      made->num_counted = row;
    }
  }
  check_num_rows(made->num_counted, made->num_sent);
  int* const end = host_[1].mutable_data_ptr<int>();
  std::int64_t row = 0;
  for (std::int64_t expert = 0; expert < local; ++expert) {
    for (int rank = 0; rank < size; ++rank) {
      Run& run = made->runs[rank][expert];
      run.at_experts = row;
      row += run.rows;
      end[groups_by_rank() ? expert * size + rank : expert] =
          static_cast<int>(row);
    }
  }
  const std::vector<Run>& own = made->runs[group().rank()];
  made->stay_begin = own.front().at_home;
  made->stay_end = own.back().at_home + own.back().rows;
  made->num_received = row;
  counts_->submit([ends = made->ends, from = host_[1]] {
    copy_bytes(
        ends.mutable_data_ptr(),
        from.const_data_ptr(),
        static_cast<std::int64_t>(ends.nbytes()),
        ends.device());
  });
  Event uploaded;
  uploaded.record(*counts_);
  uploaded.wait(*current_stream(device));
}

void PeerExchange::restart() {
  counts_->reset();
  StreamExchange::restart();
  half_ = 0;
  hosts_->restart();
}

std::vector<std::vector<PeerExchange::Part>> PeerExchange::parts_by_fence(
    const Plan& plan,
    const nn::TensorList& out,
    const nn::TensorList& in) const {
  std::vector<std::vector<Part>> fences(1);
  std::int64_t in_window = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const std::int64_t row = nbytes_of_row(in[i]);
    if (in_window + plan.most_counted * row > window_nbytes_) {
      fences.emplace_back();
      in_window = 0;
    }
    fences.back().push_back(
        {.row = row,
         .from = static_cast<const char*>(in[i].const_data_ptr()),
         .to = static_cast<char*>(out[i].mutable_data_ptr()),
         .in_window = in_window});
    in_window += plan.most_counted * row;
  }
  return fences;
}

std::function<void()> PeerExchange::travel(
    const nn::ExchangePlanPtr& plan,
    Way way,
    const nn::TensorList& out,
    const nn::TensorList& rows) {
  const auto* const made = own<const Plan>(plan);
  for (const at::Tensor& tensor : rows) {
    FLATSHARD_CHECK(
        made->most_counted * nbytes_of_row(tensor) <= window_nbytes_,
        config,
        "exchange of tokens by copies: a rank has {} rows of {} bytes, and "
        "windows of {} bytes; make them larger, or exchange by collectives "
        "(parallelism.token_exchange)",
        made->most_counted,
        nbytes_of_row(tensor),
        window_nbytes_);
  }
  // The plan lives as long as the graph.
  return [this, plan, made, way, rows, out] {
    for (const auto& parts : parts_by_fence(*made, out, rows)) {
      half_ = 1 - half_;
      way == Way::dispatch ? dispatch(*made, parts) : combine(*made, parts);
    }
  };
}

void PeerExchange::dispatch(const Plan& plan, const std::vector<Part>& parts) {
  const int rank = group().rank();
  const int size = group().size();
  std::vector<BytesCopy> leaving;
  for (const Part& part : parts) {
    const auto leave = [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t at = begin * part.row;
      leaving.push_back(
          {.to = window(rank, part) + at,
           .from = part.from + at,
           .nbytes = (end - begin) * part.row});
    };
    leave(0, plan.stay_begin);
    leave(plan.stay_end, plan.num_counted);
  }
  copy(leaving);
  group().fence();
  // The ranks begin with their next one each, so that no two read from one.
  std::vector<BytesCopy> arriving;
  for (int i = 1; i <= size; ++i) {
    const int peer = (rank + i) % size;
    for (const Part& part : parts) {
      const char* const rows = peer == rank ? part.from : window(peer, part);
      for (const Run& run : plan.runs[peer]) {
        arriving.push_back(
            {.to = part.to + run.at_experts * part.row,
             .from = rows + run.at_home * part.row,
             .nbytes = run.rows * part.row});
      }
    }
  }
  copy(arriving);
}

void PeerExchange::combine(const Plan& plan, const std::vector<Part>& parts) {
  const int rank = group().rank();
  const int size = group().size();
  std::vector<BytesCopy> leaving;
  for (int i = 1; i <= size; ++i) {
    const int peer = (rank + i) % size;
    for (const Part& part : parts) {
      char* const rows = peer == rank ? part.to : window(peer, part);
      for (const Run& run : plan.runs[peer]) {
        leaving.push_back(
            {.to = rows + run.at_home * part.row,
             .from = part.from + run.at_experts * part.row,
             .nbytes = run.rows * part.row});
      }
    }
  }
  copy(leaving);
  group().fence();
  std::vector<BytesCopy> arriving;
  for (const Part& part : parts) {
    const auto arrive = [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t at = begin * part.row;
      arriving.push_back(
          {.to = part.to + at,
           .from = window(rank, part) + at,
           .nbytes = (end - begin) * part.row});
    };
    arrive(0, plan.stay_begin);
    arrive(plan.stay_end, plan.num_counted);
  }
  copy(arriving);
}

void PeerExchange::copy(const std::vector<BytesCopy>& copies) const {
  copy_bytes(copies, windows_->local().device());
}

char* PeerExchange::window(int rank, const Part& part) const {
  return static_cast<char*>(windows_->of(rank).mutable_data_ptr()) +
         half_ * half_nbytes_ + part.in_window;
}

}  // namespace flatshard
