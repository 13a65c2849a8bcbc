#include "flatshard/peer/page_communicator.h"

#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/peer/peer_backend.h"
#include "flatshard/peer/peer_memory.h"

namespace flatshard {
namespace {

constexpr std::int64_t kPageHalves = 2;
// A reader's cache line contains nothing that the writer writes meanwhile.
constexpr std::int64_t kLineNbytes = 64;
// After this many polls the host yields its core between two polls.
constexpr int kBusyLooks = 2000;
constexpr auto kNap = std::chrono::microseconds(20);

// First on the pages of each rank; the two halves of its numbers follow.
struct Header {
  std::uint64_t num_published = 0;  ///< rounds whose numbers are published
  std::array<std::int64_t, kPageHalves> nbytes{};
};
static_assert(sizeof(Header) <= kLineNbytes);

std::int64_t up_to_lines(std::int64_t nbytes) {
  return round_up(nbytes, kLineNbytes);
}

// Round n uses half n % 2. A rank writes into a half that its peers have read:
// they published round n - 1 after they had read round n
// - 2.
class PageCommunicator : public Communicator {
 public:
  PageCommunicator(
      std::shared_ptr<Communicator> group,
      const PageCommunicatorOptions& options)
      : Communicator(
            group->rank(),
            group->size(),
            group->name() + ".pages",
            at::Device(at::kCPU)),
        group_(std::move(group)),
        half_nbytes_(up_to_lines(options.max_nbytes)),
        max_nbytes_(options.max_nbytes),
        timeout_(options.timeout),
        pages_(detail::make_shared_pages(
            *group_,
            kLineNbytes + kPageHalves * half_nbytes_)) {}

  // A rank may have published rounds that others have not reached.
  void restart() override {
    barrier_of(*group_);  // no rank reads any more
    num_published_ = 0;
    std::atomic_ref(header(rank()).num_published).store(0);
    barrier_of(*group_);
  }

 protected:
  void do_all_gather(Tensors outs, Tensors ins) override {
    for (std::size_t i = 0; i < ins.size(); ++i) {
      gather(outs[i], ins[i]);
    }
  }
  void do_reduce_scatter(Tensors, Tensors, ReduceOp) override { refuse(); }
  void do_all_reduce(at::Tensor, ReduceOp) override { refuse(); }
  void do_broadcast(at::Tensor, int) override { refuse(); }
  void do_all_to_all(at::Tensor, at::Tensor, Parts, Parts) override {
    refuse();
  }
  void do_barrier() override { refuse(); }
  void do_abort() override { aborted_ = true; }

 private:
  void gather(const at::Tensor& out, const at::Tensor& in) {
    const auto nbytes = static_cast<std::int64_t>(in.nbytes());
    FLATSHARD_CHECK(
        nbytes <= max_nbytes_,
        usage,
        "all_gather on '{}': expected at most {} bytes of each rank, got {}",
        name(),
        max_nbytes_,
        nbytes);
    const std::uint64_t round = ++num_published_;
    const auto half = static_cast<std::int64_t>(round % kPageHalves);
    Header& mine = header(rank());
    mine.nbytes[half] = nbytes;
    std::memcpy(numbers(rank(), half), in.const_data_ptr(), in.nbytes());
    std::atomic_ref(mine.num_published).store(round, std::memory_order_release);
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    for (int peer = 0; peer < size(); ++peer, to += nbytes) {
      wait_for(peer, round);
      const std::int64_t theirs = header(peer).nbytes[half];
      FLATSHARD_CHECK(
          theirs == nbytes,
          comm,
          "all_gather on '{}': rank {} of the group sends {} bytes, this rank "
          "{}; all ranks must all-gather the same sizes in the same order",
          name(),
          peer,
          theirs,
          nbytes);
      std::memcpy(to, numbers(peer, half), in.nbytes());
    }
  }

  void wait_for(int peer, std::uint64_t round) {
    const std::atomic_ref published(header(peer).num_published);
    const auto end = std::chrono::steady_clock::now() + timeout_;
    for (int look = 0; published.load(std::memory_order_acquire) < round;
         ++look) {
      if (aborted_) {
        throw Error(ErrorCode::comm, "it was aborted", here());
      }
      if (look < kBusyLooks) {
        continue;
      }
      if (std::chrono::steady_clock::now() > end) {
        throw Error(
            ErrorCode::timeout,
            fmt::format(
                "rank {} of the group did not arrive within {} ms",
                peer,
                timeout_.count()),
            here());
      }
      std::this_thread::sleep_for(kNap);
    }
  }

  [[noreturn]] void refuse() const {
    FLATSHARD_THROW(
        usage,
        "communicator '{}' uses the hosts' shared pages: it supports only "
        "all-gathers",
        name());
  }

  std::string here() const { return where(CollectiveKind::all_gather); }
  char* page(int peer) const {
    return static_cast<char*>(pages_->of(peer).mutable_data_ptr());
  }
  Header& header(int peer) const {
    return *reinterpret_cast<Header*>(page(peer));
  }
  char* numbers(int peer, std::int64_t half) const {
    return page(peer) + kLineNbytes + half * half_nbytes_;
  }

  std::shared_ptr<Communicator> group_;
  std::int64_t half_nbytes_;
  std::int64_t max_nbytes_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<PeerMemory> pages_;
  std::uint64_t num_published_ = 0;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::shared_ptr<Communicator> make_page_communicator(
    std::shared_ptr<Communicator> group,
    const PageCommunicatorOptions& options) {
  return std::make_shared<PageCommunicator>(std::move(group), options);
}

}  // namespace flatshard
