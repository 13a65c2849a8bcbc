#include "flatshard/flight/watcher.h"

#include <algorithm>

#include "flatshard/comm/communicator.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard::detail {
namespace {

using namespace std::chrono_literals;

// Rank 0 may serve the store, so it stays this long for the other ranks.
constexpr auto kLinger = 2s;

std::chrono::milliseconds clamp(
    std::chrono::milliseconds value,
    std::chrono::milliseconds low,
    std::chrono::milliseconds high) {
  return std::clamp(value, low, high);
}

StoreHandle own_connection(const StoreHandle& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;  // a store of the program's own kind
  }
}

}  // namespace

FlightWatcher::FlightWatcher(
    int rank,
    int world,
    StoreHandle store,
    at::Device device,
    FlightRecorderOptions options)
    : rank_(rank),
      world_(world),
      device_(device),
      options_(std::move(options)),
      tick_(clamp(options_.timeout / 20, 20ms, 1s)),
      stalled_after_(options_.timeout - 4 * tick_),
      settle_(clamp(options_.timeout / 4, 100ms, 5s)),
      abort_patience_(settle_ + kLinger),
      store_(make_prefix_store(
          "flight/" + options_.name,
          own_connection(std::move(store)))),
      ring_(device, options_.capacity),
      self_(this_process(rank)),
      views_(world),
      last_beat_(world, Clock::now()) {
  for (int r = 0; r < world_; ++r) {
    views_[r].state.rank = r;
  }
}

std::string FlightWatcher::key(int rank) const {
  return fmt::format("rank/{}", rank);
}

void FlightWatcher::start() {
  publish();
  if (store_->add("come", 1) == world_) {
    store_->set("all", std::string("1"));
  }
  try {
    store_->wait({"all"}, options_.connect_timeout);
  } catch (const std::exception& error) {
    std::vector<int> absent;
    for (int r = 0; r < world_; ++r) {
      if (!store_->check({key(r)})) {
        absent.push_back(r);
      }
    }
    throw Error(
        ErrorCode::timeout,
        fmt::format(
            "ranks {} of {} did not join within {} ms; check for ranks that "
            "did not start or that failed",
            rank_list(absent),
            world_,
            options_.connect_timeout.count()),
        fmt::format("rank {}/{} | connect", rank_, world_));
  }
  last_beat_.assign(world_, Clock::now());
  last_answer_ = Clock::now();
  const auto self = shared_from_this();
  guard_thread_ = std::thread([self] { self->run_guard(); });
  store_thread_ = std::thread([self] { self->run_store(); });
}

void FlightWatcher::add(std::weak_ptr<Communicator> communicator) {
  const std::lock_guard lock(mutex_);
  std::erase_if(communicators_, [](const auto& c) { return c.expired(); });
  communicators_.push_back(std::move(communicator));
}

void FlightWatcher::add_with_abort(
    std::weak_ptr<std::function<void()>> action) {
  const std::lock_guard lock(mutex_);
  std::erase_if(with_abort_, [](const auto& a) { return a.expired(); });
  with_abort_.push_back(std::move(action));
}

FlightState FlightWatcher::state(int num_entries) {
  FlightState state;
  {
    const std::lock_guard lock(mutex_);
    state = self_;
  }
  state.step = step_;
  state.tracks = ring_.tracks(num_entries);
  return state;
}

// -- store thread -------------------------------------------------------------

void FlightWatcher::run_store() {
  try {
    if (device_.is_cuda()) {
      set_current_device(device_);  // events are queried from here
    }
    while (!tick()) {
      wait_for_tick();
    }
  } catch (const std::exception& error) {
    bool leaving = false;
    {
      const std::lock_guard lock(mutex_);
      leaving = closing_ || leader_.status == RankStatus::left;
    }
    if (!leaving && !concluded_) {
      const std::string text = error.what();
      conclude(store_verdict(
          fmt::format("failed ({})", text.substr(0, text.find('\n'))),
          ErrorCode::comm));
    }
  }
  {
    const std::lock_guard lock(mutex_);
    store_done_ = true;
  }
  changed_.notify_all();
}

void FlightWatcher::wait_for_tick() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(
      lock,
      suspicious_since_ || missing_since_
          ? std::max<Milliseconds>(tick_ / 4, 5ms)
          : tick_,
      [this] { return woken_ || closing_ || proposal_ || verdict_; });
  woken_ = false;
}

bool FlightWatcher::tick() {
  if (concluded_) {
    acknowledge();
    return true;
  }
  publish();
  std::optional<Verdict> proposal;
  bool closing = false;
  {
    const std::lock_guard lock(mutex_);
    proposal = proposal_;
    closing = closing_;
  }
  if (!read_verdict()) {
    if (proposal) {
      write_verdict(*proposal);
    } else if (closing) {
      leave();
      return true;
    } else if (rank_ != 0 && leader_left()) {
      return true;
    } else if (rank_ == 0 || is_missing(0)) {
      judge();
    }
  }
  if (concluded_) {
    acknowledge();
    return true;
  }
  return false;
}

void FlightWatcher::publish() {
  if (ask([&] { return store_->check({"dump"}); })) {
    dump_request_ = std::stoll(ask([&] { return store_->get_to_str("dump"); }));
  }
  FlightState state =
      this->state(dump_request_ != 0 ? options_.capacity : kNumEntries);
  {
    const std::lock_guard lock(mutex_);
    self_.beat += 1;
    state.beat = self_.beat;
  }
  state.dump = dump_request_;
  ask([&] { store_->set(key(rank_), serialize(state)); });
  RankView& own = views_[rank_];
  take(own, std::move(state));
  trouble_ = trouble_ || own.state.status == RankStatus::troubled;
}

// Rank 0 may serve the store: when it leaves, nothing more can be read.
bool FlightWatcher::leader_left() {
  read(0);
  if (views_[0].state.status != RankStatus::left) {
    return false;
  }
  {
    const std::lock_guard lock(mutex_);
    self_.saw_leader_leave = true;
  }
  publish();
  return true;
}

void FlightWatcher::write_verdict(const Verdict& verdict) {
  const std::string winner = ask([&] {
    return store_->compareSet("verdict", std::string(), serialize(verdict));
  });
  conclude(parse_verdict(winner));
}

bool FlightWatcher::read_verdict() {
  if (!ask([&] { return store_->check({"verdict"}); })) {
    return false;
  }
  conclude(parse_verdict(ask([&] { return store_->get_to_str("verdict"); })));
  return true;
}

void FlightWatcher::acknowledge() {
  std::int64_t count = ask([&] { return store_->add("acks", 1); });
  if (rank_ != 0) {
    return;
  }
  const auto wanted = world_ - verdict()->num_missing;
  const auto deadline = Clock::now() + kLinger;
  while (count < wanted && Clock::now() < deadline) {
    std::this_thread::sleep_for(5ms);
    count = ask([&] { return store_->add("acks", 0); });
  }
}

void FlightWatcher::leave() {
  {
    const std::lock_guard lock(mutex_);
    self_.status = RankStatus::left;
  }
  publish();
  if (rank_ != 0) {
    return;
  }
  const auto deadline = Clock::now() + kLinger;
  for (int r = 1; r < world_; ++r) {
    const auto may_go = [&] {
      const FlightState& other = views_[r].state;
      return other.status == RankStatus::left ||
             other.status == RankStatus::failed || other.saw_leader_leave ||
             process_state(other) == ProcessState::gone;
    };
    for (read(r); !may_go() && Clock::now() < deadline; read(r)) {
      std::this_thread::sleep_for(5ms);
    }
  }
}

// -- from any thread ----------------------------------------------------------

void FlightWatcher::conclude(const Verdict& verdict) {
  {
    const std::lock_guard lock(mutex_);
    if (verdict_) {
      return;
    }
    verdict_ = verdict;
    verdict_at_ = Clock::now();
    concluded_ = true;
  }
  changed_.notify_all();
}

std::optional<Verdict> FlightWatcher::verdict() const {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

std::optional<Verdict> FlightWatcher::final_verdict() {
  std::unique_lock lock(mutex_);
  if (verdict_) {
    changed_.wait_until(lock, verdict_at_ + abort_patience_, [this] {
      return aborted_;
    });
  }
  return verdict_;
}

Verdict FlightWatcher::failure(const std::string& message) {
  {
    const std::lock_guard lock(mutex_);
    self_.status = RankStatus::failed;
    self_.message = message;
  }
  std::vector<RankView> own(1);
  own[0].state = state(kNumEntries);
  own[0].seen = true;
  return {
      ErrorCode::comm,
      0,
      fmt::format(
          "rank {} of {} failed: {}\n{}",
          rank_,
          world_,
          message,
          flight_table(own, {}))};
}

Verdict FlightWatcher::propose(Verdict verdict) {
  std::unique_lock lock(mutex_);
  if (!proposal_) {
    proposal_ = verdict;
  }
  changed_.notify_all();
  changed_.wait_for(lock, settle_ + kLinger, [this] {
    return verdict_ || store_done_;
  });
  lock.unlock();
  conclude(verdict);  // unless there is one, else this rank at least has its
                      // own
  return *final_verdict();
}

std::optional<Verdict> FlightWatcher::await_verdict(
    const std::string& trouble) {
  std::unique_lock lock(mutex_);
  if (self_.status == RankStatus::running) {
    self_.status = RankStatus::troubled;
    self_.message = trouble;
  }
  woken_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, 2 * settle_ + 8 * tick_ + kLinger, [this] {
    return verdict_ || store_done_;
  });
  lock.unlock();
  return final_verdict();
}

void FlightWatcher::close(const std::optional<std::string>& failure) {
  if (failure && !concluded_) {
    propose(this->failure(*failure));
  }
  std::unique_lock lock(mutex_);
  closing_ = true;
  if (abort_thread_.get_id() == std::this_thread::get_id()) {
    aborted_ = true;  // this thread owned the last communicator
  }
  changed_.notify_all();
  const auto patience = settle_ + 2 * kLinger;
  changed_.wait_for(lock, patience, [this] {
    return store_done_ || store_lost_;
  });
  stop_guard_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, patience, [this] { return guard_done_; });
  const bool store_done = store_done_;
  const bool guard_done = guard_done_;
  const bool aborted = aborted_;
  left_behind_ = !guard_done;
  lock.unlock();
  const auto end = [](std::thread& thread, bool done) {
    if (!thread.joinable()) {
      return;
    }
    // The last owner may be the abort thread: it owned a communicator.
    if (done && thread.get_id() != std::this_thread::get_id()) {
      thread.join();
    } else {
      thread.detach();
    }
  };
  end(store_thread_, store_done);
  end(guard_thread_, guard_done);
  if (guard_done) {
    end(abort_thread_, aborted);
  }
}

}  // namespace flatshard::detail
