#include "tests/support/thread_groups.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "flatshard/comm/comm_backend.h"
#include "flatshard/core/error.h"

namespace flatshard::testing {
namespace {

/// A rank's data for its peers in one collective.
struct Outgoing {
  std::vector<char> bytes;
  /// Rank r reads from [r] up to [r + 1]. When it is empty, each rank reads all
  /// bytes.
  std::vector<std::size_t> begins;

  std::span<const char> of(int rank) const {
    const std::span<const char> all = bytes;
    return begins.empty()
               ? all
               : all.subspan(begins[rank], begins[rank + 1] - begins[rank]);
  }
};

/// The state that the ranks of a group share. A rank fills its `Outgoing`,
/// meets the others, and reads their data. There are two of each, used in turn:
/// a rank that has met the others once more has read the previous data.
class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds timeout)
      : timeout_(timeout), outgoing_(size) {}

  /// Returns when all ranks have come as often as this one.
  void meet() {
    std::unique_lock lock(mutex_);
    check();
    if (++num_here_ == outgoing_.size()) {
      num_here_ = 0;
      ++round_;
      all_here_.notify_all();
      return;
    }
    const std::int64_t round = round_;
    if (!all_here_.wait_for(lock, timeout_, [&] {
          return round_ != round || ended_by_;
        })) {
      ended_by_ = "a peer timed out";
      all_here_.notify_all();
      throw std::runtime_error("timed out waiting for a thread");
    }
    if (round_ == round) {
      check();
    }
  }

  /// Ends ranks that wait, and ranks that come later.
  void end(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (!ended_by_) {
      ended_by_ = why;
    }
    all_here_.notify_all();
  }

  Outgoing& outgoing(int rank, int turn) { return outgoing_[rank][turn]; }

 private:
  void check() const {
    if (ended_by_) {
      throw std::runtime_error(*ended_by_);
    }
  }

  std::chrono::milliseconds timeout_;
  std::vector<std::array<Outgoing, 2>> outgoing_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::size_t num_here_ = 0;
  std::int64_t round_ = 0;
  std::optional<std::string> ended_by_;
};

/// Runs when it is waited for, on the thread that waits.
class DeferredWork : public c10d::Work {
 public:
  explicit DeferredWork(std::function<void()> run) : run_(std::move(run)) {}
  bool wait(std::chrono::milliseconds) override {
    run_();
    return true;
  }

 private:
  std::function<void()> run_;
};

/// The part of c10d's Gloo that the CPU's communicator needs.
class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(int rank, int size, std::shared_ptr<Meeting> meeting)
      : Backend(rank, size), meeting_(std::move(meeting)) {}

  ~ThreadBackend() override {
    meeting_->end(fmt::format("rank {} has left", getRank()));
  }

  void abort() override {
    meeting_->end(fmt::format("rank {} has aborted", getRank()));
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& out,
      at::Tensor& in,
      const c10d::AllgatherOptions&) override {
    return defer([this, out, in] {
      fill(in, {});
      take(out, 0, getSize());
    });
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outs,
      std::vector<at::Tensor>& ins,
      const c10d::AllgatherOptions&) override {
    return defer([this, slices = outs.at(0), in = ins.at(0)] {
      fill(in, {});
      meeting_->meet();
      for (int peer = 0; peer < getSize(); ++peer) {
        copy_of(peer, slices[peer].mutable_data_ptr(), slices[peer].nbytes());
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& out,
      at::Tensor& in,
      std::vector<std::int64_t>& rows_received,
      std::vector<std::int64_t>& rows_sent,
      const c10d::AllToAllOptions&) override {
    return defer([this, out, in, rows_sent] {
      fill(in, begins_of(in, rows_sent));
      take(out, 0, getSize());
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override {
    const auto root = static_cast<int>(options.rootRank);
    return defer([this, tensor = tensors.at(0), root] {
      if (getRank() == root) {
        fill(tensor, {});
      }
      take(tensor, root, root + 1);
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& = {}) override {
    return defer([this] { meeting_->meet(); });
  }

 private:
  c10::intrusive_ptr<c10d::Work> defer(std::function<void()> run) {
    return c10::make_intrusive<DeferredWork>([this, run = std::move(run)] {
      turn_ = 1 - turn_;
      run();
    });
  }

  void fill(const at::Tensor& in, std::vector<std::size_t> begins) {
    Outgoing& mine = meeting_->outgoing(getRank(), turn_);
    const auto* const data = static_cast<const char*>(in.const_data_ptr());
    mine.bytes.assign(data, data + in.nbytes());
    mine.begins = std::move(begins);
  }

  /// Copies the data of ranks [first, last) to `out`, once all have arrived.
  void take(const at::Tensor& out, int first, int last) {
    meeting_->meet();
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    std::size_t room = out.nbytes();
    for (int peer = first; peer < last; ++peer) {
      const std::size_t copied = copy_of(peer, to, room);
      to += copied;
      room -= copied;
    }
  }

  /// Copies what `peer` sends this rank, at most `room` bytes; returns how
  /// many.
  std::size_t copy_of(int peer, void* to, std::size_t room) {
    const std::span<const char> theirs =
        meeting_->outgoing(peer, turn_).of(getRank());
    if (theirs.size() > room) {
      throw std::runtime_error(fmt::format(
          "expected at most {} bytes, got {}",
          room,
          theirs.size()));
    }
    std::copy(theirs.begin(), theirs.end(), static_cast<char*>(to));
    return theirs.size();
  }

  /// Without numbers of rows each rank gets as many.
  std::vector<std::size_t> begins_of(
      const at::Tensor& in,
      const std::vector<std::int64_t>& rows) const {
    std::vector<std::size_t> begins{0};
    for (int peer = 0; peer < getSize(); ++peer) {
      const std::size_t nbytes = rows.empty() ? in.nbytes() / getSize()
                                 : in.size(0) == 0
                                     ? 0
                                     : in.nbytes() / in.size(0) * rows[peer];
      begins.push_back(begins.back() + nbytes);
    }
    return begins;
  }

  std::shared_ptr<Meeting> meeting_;
  int turn_ = 0;
};

/// Rank 0 creates it. Its address is shared through the store. Ranks in other
/// processes cannot reach that, and all have it before any continues.
std::shared_ptr<Meeting> join(
    const StoreHandle& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout) {
  using Shared = std::shared_ptr<Meeting>;
  constexpr auto kKey = "meeting";
  if (rank != 0) {
    const std::vector<std::uint8_t> bytes = store->get(kKey);
    const Shared* theirs = nullptr;
    std::memcpy(&theirs, bytes.data(), sizeof(theirs));
    Shared meeting = *theirs;
    meeting->meet();
    return meeting;
  }
  // Stays when a rank does not come in time: it may come later.
  auto* const shared = new Shared(std::make_shared<Meeting>(size, timeout));
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&shared);
  store->set(kKey, std::vector<std::uint8_t>(bytes, bytes + sizeof(shared)));
  Shared meeting = *shared;
  meeting->meet();
  delete shared;
  return meeting;
}

}  // namespace

std::shared_ptr<Communicator> make_thread_communicator(
    StoreHandle store,
    int rank,
    int size,
    const std::string& name,
    at::Device device,
    const CommunicatorOptions& options) {
  FLATSHARD_CHECK(
      device.is_cpu(),
      usage,
      "communicator '{}' of threads: expected a CPU, got '{}'",
      name,
      device.str());
  c10::intrusive_ptr<ThreadBackend> backend;
  detail::with_comm_errors(
      fmt::format("rank {}/{} | {} | connect", rank, size, name),
      [&] {
        backend = c10::make_intrusive<ThreadBackend>(
            rank,
            size,
            join(
                make_prefix_store(name, std::move(store)),
                rank,
                size,
                options.timeout));
      });
  return detail::make_gloo_communicator(std::move(backend), name, options);
}

}  // namespace flatshard::testing
