#include "flatshard/graphs/watched_graphs.h"

#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/flight/recorder.h"

#include <c10/util/ScopeExit.h>

#include <mutex>
#include <utility>
#include <vector>

namespace flatshard {
namespace {

// A graph that the recorder's thread may destroy. A thread that launches a
// replay may wait for the device under the lock, until the abort ends its
// wait.
struct HeldGraph {
  std::mutex mutex;
  std::unique_ptr<DeviceGraph> graph;
};

class HeldGraphs {
 public:
  void add(const std::shared_ptr<HeldGraph>& held) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& weak) { return weak.expired(); });
    all_.push_back(held);
  }
  void drop() {
    std::vector<std::weak_ptr<HeldGraph>> all;
    {
      const std::lock_guard lock(mutex_);
      all.swap(all_);
    }
    for (const auto& weak : all) {
      if (const auto held = weak.lock()) {
        const std::lock_guard lock(held->mutex);
        held->graph.reset();
      }
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<HeldGraph>> all_;
};

// The state that the graphs of a pool share. The recorder may be gone before
// them.
struct GraphWatch {
  explicit GraphWatch(const std::shared_ptr<FlightRecorder>& recorder)
      : flight(recorder),
        with_abort(recorder->with_abort([all = graphs] { all->drop(); })) {}

  std::shared_ptr<HeldGraphs> graphs = std::make_shared<HeldGraphs>();
  std::weak_ptr<FlightRecorder> flight;
  FlightRecorder::WithAbort with_abort;
};

class WatchedGraph final : public DeviceGraph {
 public:
  WatchedGraph(
      std::shared_ptr<GraphWatch> watch,
      std::shared_ptr<CapturedCollectives> collectives,
      std::unique_ptr<DeviceGraph> graph)
      : watch_(std::move(watch)),
        collectives_(std::move(collectives)),
        outputs_(graph->outputs()) {
    held_->graph = std::move(graph);
    watch_->graphs->add(held_);
  }

  const std::vector<at::Tensor>& outputs() const override { return outputs_; }

  void replay() override {
    const auto flight = watch_->flight.lock();
    {
      const std::lock_guard lock(held_->mutex);
      check_held(flight.get());
      held_->graph->replay();
    }
    if (flight != nullptr) {
      const CollectiveScope* const scope = CollectiveScope::current();
      flight->replayed(collectives_, scope != nullptr ? scope->step() : -1);
    }
  }

  GraphAudit audit(const std::vector<at::Tensor>& declared) const override {
    const std::lock_guard lock(held_->mutex);
    check_held(watch_->flight.lock().get());
    return held_->graph->audit(declared);
  }

 private:
  void check_held(const FlightRecorder* flight) const {
    if (held_->graph != nullptr) {
      return;
    }
    if (flight != nullptr) {
      flight->check();  // throws the verdict that dropped the graph
    }
    FLATSHARD_THROW(internal, "a graph with collectives is gone");
  }

  std::shared_ptr<GraphWatch> watch_;
  std::shared_ptr<CapturedCollectives> collectives_;
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<HeldGraph> held_ = std::make_shared<HeldGraph>();
};

class WatchedGraphPool final : public GraphPool {
 public:
  WatchedGraphPool(
      std::shared_ptr<GraphPool> pool,
      const std::shared_ptr<FlightRecorder>& flight)
      : pool_(std::move(pool)), watch_(std::make_shared<GraphWatch>(flight)) {}

  std::unique_ptr<DeviceGraph> capture(
      DeviceGraph::Work work,
      const std::vector<at::Generator>& generators) override {
    const auto flight = watch_->flight.lock();
    FLATSHARD_CHECK(flight, internal, "a graph is captured after its mesh");
    const auto collectives = flight->make_captured();
    const auto recorded = [&] {
      bool failed = true;
      const auto done = c10::make_scope_exit([&] {
        if (failed) {
          flight->end_capture(/*failed=*/true);
        }
      });
      flight->begin_capture(collectives);
      std::vector<at::Tensor> outputs = work();
      flight->end_capture(/*failed=*/false);
      failed = false;
      return outputs;
    };
    return std::make_unique<WatchedGraph>(
        watch_,
        collectives,
        pool_->capture(recorded, generators));
  }
  void make_room() override { pool_->make_room(); }
  std::int64_t nbytes() const override { return pool_->nbytes(); }

 private:
  std::shared_ptr<GraphPool> pool_;
  std::shared_ptr<GraphWatch> watch_;
};

}  // namespace

std::shared_ptr<GraphPool> watch_collectives(
    std::shared_ptr<GraphPool> pool,
    at::Device device,
    const std::shared_ptr<FlightRecorder>& flight) {
  if (!device.is_cuda() || flight == nullptr) {
    return pool;
  }
  return std::make_shared<WatchedGraphPool>(std::move(pool), flight);
}

}  // namespace flatshard
