#include "flatshard/plan/step_writer.h"

#include "flatshard/core/error.h"
#include "flatshard/plan/links.h"
#include "flatshard/plan/slot_places.h"
#include "flatshard/plan/unit_prices.h"
#include "flatshard/schedule/simulate.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace flatshard::plan {
namespace {

constexpr double kMicroSecond = 1e-6;
constexpr int kNoOperation = -1;

/// Whether a plan has a place for every slot that these actions take: else the
/// runtime plans anew.
bool has_all_places(
    const SlotPlan& plan,
    const std::vector<SlotLifetime>& lifetimes) {
  return std::ranges::all_of(lifetimes, [&](const SlotLifetime& life) {
    return life.nbytes == 0 || plan.offset(life.key) >= 0;
  });
}

bool begins(EventKind kind) {
  switch (kind) {
    case EventKind::forward_begin:
    case EventKind::recompute_begin:
    case EventKind::backward_begin:
    case EventKind::task_begin:
    case EventKind::microbatch:
      return true;
    default:
      return false;
  }
}

/// A GPU whose links are as slow as they are while compute runs. The network is
/// not slower then.
Gpu with_slowed_links(Gpu gpu) {
  const auto slow = [](Curve& curve, double times) {
    for (double& rate : curve.rates) {
      rate /= times;
    }
  };
  for (Curve* curve :
       {&gpu.nvlink.all_gather,
        &gpu.nvlink.reduce_scatter,
        &gpu.nvlink.all_reduce,
        &gpu.nvlink.all_to_all}) {
    slow(*curve, gpu.contention.slowed_collectives);
  }
  slow(gpu.nvlink.copies, gpu.contention.slowed_copies);
  slow(gpu.nvlink.copied_reductions, gpu.contention.slowed_copies);
  gpu.passes["engine_copy"] /= gpu.contention.slowed_copies;
  return gpu;
}

/// Writes the operations of steps: what the Executor does with streams and
/// slots, on paper.
class StepWriter {
 public:
  StepWriter(
      const Job& job,
      int microbatches,
      const std::vector<UnitPlan>& units,
      const Gpu& gpu)
      : job_(job),
        units_(units),
        gpu_(gpu),
        slowed_gpu_(with_slowed_links(gpu)) {
    for (const UnitPlan& unit : units) {
      specs_.push_back(unit.spec);
      prices_.push_back(price_unit(unit, job, gpu_));
      slowed_prices_.push_back(price_unit(unit, job, slowed_gpu_));
    }
    weights_.resize(units.size());
    for (std::size_t u = 0; u < units.size(); ++u) {
      weights_[u].resize(specs_[u].num_slices());
    }
    states_.resize(units.size());
    plan_ = overlap_plan(
        static_cast<int>(job.plan_units.layers.size()),
        microbatches,
        job.overlap);
    events_ = plan_events_by_step(plan_, job.plan_units, job.overlap);
    waits_.assign(plan_.size(), kNoOperation);
    for (const PlanWait& wait : plan_waits(
             plan_,
             static_cast<int>(job.plan_units.layers.size()),
             job.overlap)) {
      waits_[wait.waiter] = wait.earlier;
    }
    plan_slots();
  }

  /// Writes one more step. @return the first operation of it.
  int write_step() {
    const int first = static_cast<int>(operations_.size());
    activations_ = 0;
    gradients_ = 0;
    most_ = 0;
    most_activations_ = 0;
    host_ = 0;
    kinds_.clear();
    for (UnitState& state : states_) {
      state.has_gradients = false;
      state.has_local = false;
    }
    step_operation_.assign(plan_.size(), kNoOperation);
    for (std::size_t i = 0; i < plan_.size(); ++i) {
      write(static_cast<int>(i));
    }
    write_update();
    return first;
  }

  std::vector<Operation> take() { return std::move(operations_); }
  /// Of the last step.
  StepPlan summary() const {
    return {
        .host_seconds = host_,
        .kinds = kinds_,
        .slot_nbytes = places_.plan().arena_nbytes(),
        .peak_nbytes = most_,
        .activation_nbytes = most_activations_};
  }

 private:
  struct Weights {
    std::int64_t begin = -1;  ///< in the arena; -1: no slot
    int filled = kNoOperation;
    int read_by_gather = kNoOperation;
  };
  struct UnitState {
    std::int64_t grads = -1;
    int reduced = kNoOperation;
    bool has_gradients = false;
    bool has_local = false;
    int updated = kNoOperation;  ///< by the optimizer; waited for once
  };

  // The actions of a steady step decide where slots are.
  void plan_slots() {
    places_ = SlotPlaces(SlotPlan::build(
        slot_lifetimes(specs_, simulate_step(specs_, job_.scheduler))));
    Scheduler scheduler(specs_, job_.scheduler);
    std::vector<Action> actions;
    for (int step = 0; step < 2; ++step) {
      actions.clear();
      for (std::size_t i = 0; i < plan_.size(); ++i) {
        for (const ScheduleEvent& event : events_of(static_cast<int>(i))) {
          std::ranges::copy(scheduler.on(event), std::back_inserter(actions));
        }
      }
      if (step == 0) {
        first_units_ = first_of(actions);
      }
      std::ranges::copy(prefetch(scheduler), std::back_inserter(actions));
    }
    // The prefetched uses begin before the step that is planned.
    std::vector<Action> whole = prefetched_;
    whole.insert(whole.end(), actions.begin(), actions.end());
    const auto lifetimes = slot_lifetimes(specs_, whole);
    if (!has_all_places(places_.plan(), lifetimes) || job_.overlap.interleave) {
      places_ = SlotPlaces(SlotPlan::build(lifetimes));
    }
    scheduler_.emplace(specs_, job_.scheduler);
  }

  /// As GatherControl::prefetch_forward.
  std::vector<UnitId> first_of(const std::vector<Action>& actions) const {
    std::vector<UnitId> first;
    for (const Action& action : actions) {
      if (action.kind == ActionKind::gather &&
          static_cast<int>(first.size()) <= job_.scheduler.prefetch &&
          std::ranges::find(first, action.unit) == first.end()) {
        first.push_back(action.unit);
      }
    }
    return first;
  }
  std::vector<Action> prefetch(Scheduler& scheduler) {
    std::vector<Action> actions =
        scheduler.on({.kind = EventKind::weights_changed});
    prefetched_.clear();
    for (const UnitId unit : first_units_) {
      std::ranges::copy(
          scheduler.on(
              {.kind = EventKind::unshard, .unit = unit, .awaits = false}),
          std::back_inserter(prefetched_));
    }
    actions.insert(actions.end(), prefetched_.begin(), prefetched_.end());
    return actions;
  }

  /// Of a step of the plan, with the planes that its kernels ask for.
  std::vector<ScheduleEvent> events_of(int position) const {
    std::vector<ScheduleEvent> events = events_[position];
    const auto end = std::find_if(
        events.rbegin(),
        events.rend(),
        [](const ScheduleEvent& event) { return begins(event.kind); });
    std::vector<ScheduleEvent> reads;
    for (auto event = end; event != events.rend(); ++event) {
      const UnitSpec& spec = specs_[event->unit == kNoUnit ? 0 : event->unit];
      const bool backward = event->kind == EventKind::backward_begin;
      if (event->unit == kNoUnit || spec.on_request.empty() ||
          (!backward && event->kind != EventKind::forward_begin &&
           event->kind != EventKind::recompute_begin)) {
        continue;
      }
      const PlaneSet asked =
          spec.on_request &
          spec.reads(backward ? Phase::backward : Phase::forward);
      asked.for_each([&](PlaneId plane) {
        const int parts = spec.num_parts(plane);
        for (PartId part = parts > 0 ? 0 : kWhole; part < std::max(parts, 0);
             ++part) {
          reads.push_back(
              {.kind = EventKind::read,
               .unit = event->unit,
               .plane = plane,
               .part = part});
        }
      });
    }
    events.insert(end.base(), reads.begin(), reads.end());
    return events;
  }

  // -- nodes ------------------------------------------------------------------

  const LayerWork& layer_of(const PlanStep& step) const {
    return step.layer < 0 ? job_.ends
                          : job_.layer_kinds[job_.kind_of_layer[step.layer]];
  }

  void write(int position) {
    const PlanStep& step = plan_[position];
    bool computed = false;
    for (const ScheduleEvent& event : events_of(position)) {
      const bool before = begins(event.kind) || event.kind == EventKind::read;
      if (!before && !std::exchange(computed, true)) {
        compute(position);
      }
      for (const Action& action : scheduler_->on(event)) {
        carry_out(action, step.microbatch);
      }
    }
    if (!computed) {
      compute(position);
    }
    after(step);
  }

  void compute(int position) {
    const PlanStep& step = plan_[position];
    const LayerWork& layer = layer_of(step);
    const auto found = layer.nodes.find(step.node);
    const NodeWork none;
    const NodeWork& work = found == layer.nodes.end() ? none : found->second;
    Operation operation{.unit = unit_of(step), .microbatch = step.microbatch};
    const bool is_exchange = step.stream == PlanStream::exchange;
    operation.stream = is_exchange ? Stream::exchange : Stream::compute;
    if (!is_exchange) {
      operation.waits = std::exchange(pending_, {});
    }
    if (waits_[position] >= 0 &&
        step_operation_[waits_[position]] != kNoOperation) {
      operation.waits.push_back(step_operation_[waits_[position]]);
    }
    std::vector<int> under_way;
    const auto add = [&](const Kernels& kernels) {
      for (const Kernel& kernel : kernels) {
        if (kernel.is_exchange()) {
          share(kernel, operation, under_way);
          continue;
        }
        const double taken = kernel.seconds(gpu_);
        operation.seconds += taken;
        kinds_[std::string(kernel.label())] += taken;
      }
    };
    switch (step.pass) {
      case PlanPass::forward:
        operation.what = "forward";
        add(work.forward);
        break;
      case PlanPass::recompute:
        operation.what = "recompute";
        add(work.forward);
        break;
      case PlanPass::backward:
        operation.what = "backward";
        add(work.recompute);
        add(work.backward);
        if (!job_.overlap.delay_wgrad || step.layer < 0) {
          add(work.wgrad);
        }
        break;
      case PlanPass::wgrad:
        operation.what = "weight gradients";
        add(work.wgrad);
        break;
    }
    before(step);
    step_operation_[position] = is_exchange
                                    ? exchange(step, std::move(operation))
                                    : queue(std::move(operation));
    host_ += host_seconds(step);
  }

  /// Ends an operation of compute where ranks exchange activations, and begins
  /// the next one, which may wait for them.
  /// @param under_way  transfers that overlap, the oldest first.
  void
  share(const Kernel& at, Operation& operation, std::vector<int>& under_way) {
    Operation rest = operation;
    rest.seconds = 0;
    rest.waits.clear();
    const int before = queue(std::move(operation));
    operation = std::move(rest);
    if (at.kind == Kernel::Kind::finish) {
      FLATSHARD_CHECK(
          !under_way.empty(),
          internal,
          "expected a transfer that overlaps before its finish, found none");
      operation.waits.push_back(under_way.front());
      under_way.erase(under_way.begin());
      return;
    }
    const Group group = group_of(job_.tensor_ranks, 1, job_.ranks_per_host);
    const auto price = [&](const Gpu& gpu) {
      return job_.copy_activations
                 ? copy_seconds(gpu, at.nbytes, group)
                 : plan::seconds(gpu, at.transfer, at.nbytes, group);
    };
    const int transfer = queue(
        {.stream = Stream::tensor,
         .link = job_.copy_activations ? Link::copies : Link::collectives,
         .leaves_host = group.hosts() > 1,
         .seconds = price(gpu_),
         .beside_compute = price(slowed_gpu_),
         .waits = {before},
         .what = at.transfer == Transfer::all_gather ? "TP all-gather"
                                                     : "TP reduce-scatter",
         .unit = operation.unit,
         .microbatch = operation.microbatch});
    if (at.overlaps) {
      under_way.push_back(transfer);
    } else {
      operation.waits.push_back(transfer);
    }
  }

  /// The transfer of rows, and the kernel that permutes or adds them up: before
  /// it where rows leave in the order of tokens, else after it.
  /// @param kernel  that one.
  /// @return        the last of both.
  int exchange(const PlanStep& step, Operation kernel) {
    const bool forward =
        step.pass == PlanPass::forward || step.pass == PlanPass::recompute;
    const bool dispatch = step.node == PlanNode::dispatch;
    const Group group = group_of(
        job_.exchange_ranks,
        job_.exchange_stride,
        job_.ranks_per_host);
    kernel.what = dispatch ? "dispatch" : "combine";
    Operation transfer = kernel;
    transfer.link = job_.copy_exchange ? Link::copies : Link::collectives;
    transfer.leaves_host = group.hosts() > 1;
    const auto price = [&](const Gpu& gpu) {
      return job_.copy_exchange ? copy_seconds(gpu, job_.exchange_nbytes, group)
                                : seconds(
                                      gpu,
                                      Transfer::all_to_all,
                                      job_.exchange_nbytes,
                                      group);
    };
    transfer.seconds = price(gpu_);
    transfer.beside_compute = price(slowed_gpu_);
    if (dispatch == forward) {
      queue(std::move(kernel));
      return queue(std::move(transfer));
    }
    queue(std::move(transfer));
    return queue(std::move(kernel));
  }

  UnitId unit_of(const PlanStep& step) const {
    const PlanUnits& units = job_.plan_units;
    if (step.layer >= 0) {
      return units.layers[step.layer];
    }
    if (!units.ends) {
      return units.root;
    }
    return step.node == PlanNode::embed ? units.ends->embed : units.ends->head;
  }

  double host_seconds(const PlanStep& step) const {
    const bool is_exchange = step.stream == PlanStream::exchange;
    // A node without kernels, and a rank's own embedding, is a launch or two.
    const double share = step.layer < 0 ? 0.25 : is_exchange ? 0.2 : 1;
    const bool forward =
        step.pass == PlanPass::forward || step.pass == PlanPass::recompute;
    if (step.node == PlanNode::merge ||
        (step.pass == PlanPass::wgrad && !job_.overlap.delay_wgrad)) {
      return 0;
    }
    if (job_.graphs && step.layer >= 0) {
      return gpu_.host_graph_us * kMicroSecond;
    }
    return share * kMicroSecond *
           (forward ? gpu_.host_forward_us : gpu_.host_backward_us);
  }

  // -- memory -----------------------------------------------------------------

  bool is_first_of_layer(const PlanStep& step) const {
    return step.node == PlanNode::attend || step.node == PlanNode::head;
  }

  void before(const PlanStep& step) {
    const LayerWork& layer = layer_of(step);
    if (!is_first_of_layer(step)) {
      return;
    }
    if (step.pass == PlanPass::forward) {
      activations_ += job_.overlap.recompute && step.layer >= 0
                          ? layer.input_nbytes
                          : layer.saved_nbytes;
    } else if (step.pass == PlanPass::recompute) {
      activations_ += layer.saved_nbytes - layer.input_nbytes;
    }
    note_peak(step.pass == PlanPass::backward ? layer.transient_nbytes : 0);
  }

  void after(const PlanStep& step) {
    if (step.pass == PlanPass::backward && is_first_of_layer(step)) {
      activations_ -= layer_of(step).saved_nbytes;
    }
  }

  void note_peak(std::int64_t transient) {
    most_ = std::max(most_, activations_ + gradients_ + transient);
    most_activations_ = std::max(most_activations_, activations_);
  }

  // -- actions ----------------------------------------------------------------

  int queue(Operation operation) {
    const int id = static_cast<int>(operations_.size());
    last_[static_cast<std::size_t>(operation.stream)] = id;
    operations_.push_back(std::move(operation));
    return id;
  }
  int last(Stream stream) const {
    return last_[static_cast<std::size_t>(stream)];
  }
  static void add_wait(std::vector<int>& waits, int operation) {
    if (operation != kNoOperation) {
      waits.push_back(operation);
    }
  }

  Weights& weights_of(UnitId unit, PlaneId plane, PartId part) {
    return weights_[unit][specs_[unit].slice(plane, part)];
  }

  void carry_out(const Action& action, int microbatch) {
    switch (action.kind) {
      case ActionKind::gather:
        gather(action, microbatch);
        break;
      case ActionKind::derive:
        derive(action, microbatch);
        break;
      case ActionKind::await:
        add_wait(
            pending_,
            weights_of(action.unit, action.plane, action.part).filled);
        break;
      case ActionKind::release:
        release(action);
        break;
      case ActionKind::acquire_grads: {
        const auto waits = places_.acquire(
            {.unit = action.unit, .role = SlotRole::gradients},
            specs_[action.unit].grad_nbytes,
            states_[action.unit].grads);
        pending_.insert(pending_.end(), waits.begin(), waits.end());
        break;
      }
      case ActionKind::reduce:
        reduce(action, microbatch);
        break;
      case ActionKind::accumulate:
        accumulate(action.unit, microbatch);
        break;
      case ActionKind::drain:
        places_.give_back(
            states_[action.unit].grads,
            {states_[action.unit].reduced});
        break;
      case ActionKind::join:
        add_wait(pending_, last(Stream::reduce));
        add_wait(pending_, last(Stream::outer));
        break;
    }
  }

  std::vector<int> take_slot(const Action& action, Weights& held) {
    const UnitSpec& spec = specs_[action.unit];
    if (spec.resting().contains(action.plane)) {
      return {};
    }
    return places_.acquire(
        {.unit = action.unit,
         .plane = action.plane,
         .role = action.phase == Phase::forward ? SlotRole::forward_weights
                                                : SlotRole::backward_weights,
         .part = action.part},
        spec.nbytes(action.plane, action.part),
        held.begin);
  }

  void gather(const Action& action, int microbatch) {
    const UnitSpec& spec = specs_[action.unit];
    const UnitPrices& prices = prices_[action.unit];
    Weights& held = weights_of(action.unit, action.plane, action.part);
    const bool copies = action.phase == Phase::forward
                            ? job_.copy_forward_gathers
                            : job_.copy_backward_gathers;
    Operation operation{
        .stream = Stream::gather,
        .link = copies ? Link::copies : Link::collectives,
        .leaves_host = prices.gathers_leave_host,
        .waits = take_slot(action, held),
        .what = "all-gather",
        .unit = action.unit,
        .microbatch = microbatch};
    if (action.from_post_forward) {
      Weights& shards = weights_of(action.unit, spec.post_forward, kWhole);
      add_wait(operation.waits, shards.filled);
      operation.link = Link::collectives;
      operation.seconds = prices.from_post_forward;
      operation.beside_compute = slowed_prices_[action.unit].from_post_forward;
      held.filled = queue(std::move(operation));
      shards.read_by_gather = held.filled;
      return;
    }
    const bool compute_plane = action.plane == kComputePlane;
    const double share =
        action.part == kWhole
            ? 1
            : as_double(spec.nbytes(action.plane, action.part)) /
                  as_double(spec.weights_nbytes[action.plane]);
    const bool is_first = states_[action.unit].updated != kNoOperation;
    const auto price = [&](const UnitPrices& of) {
      const Gathers& gather = compute_plane ? of.compute : of.float8;
      return share * (copies ? gather.by_copies : gather.by_collective) +
             (is_first ? of.spread : 0);
    };
    operation.seconds = price(prices);
    operation.beside_compute = price(slowed_prices_[action.unit]);
    double encode = compute_plane ? prices.cast : 0;
    int& updated = states_[action.unit].updated;
    if (is_first) {
      add_wait(operation.waits, std::exchange(updated, kNoOperation));
      encode += prices.encode;
    }
    if (encode > 0) {
      queue(
          {.stream = Stream::gather,
           .seconds = encode,
           .waits = operation.waits,
           .what = "encode",
           .unit = action.unit,
           .microbatch = microbatch});
    }
    held.filled = queue(std::move(operation));
  }

  void derive(const Action& action, int microbatch) {
    const UnitSpec& spec = specs_[action.unit];
    Weights& held = weights_of(action.unit, action.plane, action.part);
    const bool saves = action.plane == spec.post_forward;
    Operation operation{
        .stream = saves ? Stream::compute : Stream::gather,
        .seconds = saves ? prices_[action.unit].save_post_forward
                         : prices_[action.unit].derive,
        .waits = take_slot(action, held),
        .what = saves ? "save shard" : "derive columns",
        .unit = action.unit,
        .microbatch = microbatch};
    if (!saves) {
      Weights& source =
          weights_of(action.unit, spec.derived_from[action.plane], action.part);
      add_wait(operation.waits, source.filled);
      held.filled = queue(std::move(operation));
      source.read_by_gather = held.filled;
    } else {
      kinds_["copy"] += operation.seconds;
      held.filled = queue(std::move(operation));
    }
  }

  void release(const Action& action) {
    Weights& held = weights_of(action.unit, action.plane, action.part);
    std::vector<int> last_use;
    add_wait(last_use, last(Stream::compute));
    add_wait(last_use, held.filled);
    add_wait(last_use, std::exchange(held.read_by_gather, kNoOperation));
    places_.give_back(held.begin, std::move(last_use));
  }

  void reduce(const Action& action, int microbatch) {
    const UnitPrices& prices = prices_[action.unit];
    const UnitPrices& slowed = slowed_prices_[action.unit];
    UnitState& state = states_[action.unit];
    const bool last_one = action.is_last;
    Operation operation{
        .stream = Stream::reduce,
        .link = job_.copy_reductions ? Link::copies : Link::collectives,
        .leaves_host = prices.reductions_leave_host,
        .seconds = last_one ? prices.reduce_last : prices.reduce,
        .beside_compute = last_one ? slowed.reduce_last : slowed.reduce,
        .what = "reduce",
        .unit = action.unit,
        .microbatch = microbatch};
    add_wait(operation.waits, last(Stream::compute));
    state.reduced = queue(std::move(operation));
    if (prices.reduce_sum > 0) {
      state.reduced = queue(
          {.stream = Stream::reduce,
           .seconds = prices.reduce_sum,
           .what = "sum of gradients",
           .unit = action.unit,
           .microbatch = microbatch});
    }
    if (prices.outer > 0 && last_one) {
      queue(
          {.stream = Stream::outer,
           .link = Link::collectives,
           .leaves_host = prices.outer_leaves_host,
           .seconds = prices.outer,
           .beside_compute = slowed.outer,
           .waits = {state.reduced},
           .what = "reduce over replicas",
           .unit = action.unit,
           .microbatch = microbatch});
    }
    if (!std::exchange(state.has_gradients, true)) {
      for (const GroupPlan& group : units_[action.unit].groups) {
        gradients_ += group.bytes.gradients;
        if (group.has_outer_stage && !last_one) {
          gradients_ += group.bytes.numel * job_.main_grads_size;
        }
      }
      note_peak(0);
    }
  }

  void accumulate(UnitId unit, int microbatch) {
    UnitState& state = states_[unit];
    Operation operation{
        .stream = Stream::reduce,
        .seconds = prices_[unit].accumulate,
        .what = "sum of gradients",
        .unit = unit,
        .microbatch = microbatch};
    add_wait(operation.waits, last(Stream::compute));
    state.reduced = queue(std::move(operation));
    if (!std::exchange(state.has_local, true)) {
      for (const GroupPlan& group : units_[unit].groups) {
        gradients_ += group.layout.numel() * job_.main_grads_size;
      }
      note_peak(0);
    }
  }

  // The norm of the gradients, the optimizer, and the first gathers after it.
  void write_update() {
    double norm = 0;
    for (const UnitPrices& prices : prices_) {
      norm += prices.norm;
    }
    if (job_.clips) {
      kinds_["sum"] += norm;
      constexpr double kNumber = 4;
      norm += seconds(
          gpu_,
          Transfer::all_reduce,
          kNumber,
          group_of(job_.ranks, 1, job_.ranks_per_host));
      queue(
          {.stream = Stream::compute,
           .seconds = norm,
           .waits = std::exchange(pending_, {}),
           .what = "gradient norm"});
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      kinds_["optimizer"] += prices_[u].optimizer;
      states_[u].updated = queue(
          {.stream = Stream::compute,
           .seconds = prices_[u].optimizer,
           .waits = std::exchange(pending_, {}),
           .what = "optimizer",
           .unit = static_cast<UnitId>(u)});
    }
    for (const Action& action : prefetch(*scheduler_)) {
      carry_out(action, 0);
    }
  }

  const Job& job_;
  const std::vector<UnitPlan>& units_;
  const Gpu& gpu_;
  const Gpu slowed_gpu_;
  std::vector<UnitSpec> specs_;
  std::vector<UnitPrices> prices_;
  std::vector<UnitPrices> slowed_prices_;  ///< of transfers beside compute
  std::vector<PlanStep> plan_;
  std::vector<std::vector<ScheduleEvent>> events_;
  std::vector<int> waits_;  ///< by position: the step that it waits for
  SlotPlaces places_;
  std::vector<UnitId> first_units_;
  std::vector<Action> prefetched_;
  std::optional<Scheduler> scheduler_;

  std::vector<Operation> operations_;
  std::array<int, kNumStreams> last_{
      kNoOperation,
      kNoOperation,
      kNoOperation,
      kNoOperation,
      kNoOperation,
      kNoOperation};
  std::vector<int> pending_;  ///< what the next operation of compute waits for
  std::vector<int> step_operation_;            ///< by position
  std::vector<std::vector<Weights>> weights_;  ///< by unit and slice
  std::vector<UnitState> states_;

  double host_ = 0;
  std::map<std::string, double> kinds_;
  std::int64_t activations_ = 0;
  std::int64_t gradients_ = 0;
  std::int64_t most_ = 0;
  std::int64_t most_activations_ = 0;
};

}  // namespace

WrittenSteps write_steps(
    const Job& job,
    int microbatches,
    const std::vector<UnitPlan>& units,
    const Gpu& gpu) {
  StepWriter writer(job, microbatches, units, gpu);
  writer.write_step();
  WrittenSteps steps{.second = writer.write_step()};
  steps.summary = writer.summary();
  steps.operations = writer.take();
  return steps;
}

}  // namespace flatshard::plan
