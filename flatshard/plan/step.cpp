#include "flatshard/plan/step.h"

#include "flatshard/plan/links.h"
#include "flatshard/schedule/simulate.h"
#include "flatshard/schedule/slot_plan.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

namespace flatshard::plan {
namespace {

constexpr double kMicroSecond = 1e-6;
constexpr int kNoOperation = -1;
/// Microbatches that are simulated; more are extrapolated.
constexpr int kMostSimulated = 4;

/// Seconds of a gather.
struct Gathers {
  double by_collective = 0;
  double by_copies = 0;
};

/// Seconds of a unit's collectives, by what they are for.
struct UnitPrices {
  Gathers compute;  ///< of all stored planes of this kind
  Gathers float8;
  double cast = 0;    ///< of main weights, before each gather
  double spread = 0;  ///< with the first gather after a change
  double encode = 0;  ///< in FP8, likewise
  double derive = 0;
  double from_post_forward = 0;
  double save_post_forward = 0;
  double reduce = 0;  ///< a microbatch that is not the last
  double reduce_last = 0;
  double reduce_sum = 0;  ///< passes over own memory beside it
  double outer = 0;       ///< in the last microbatch
  double accumulate = 0;
  double optimizer = 0;
  double norm = 0;
};

double as_double(std::int64_t n) {
  return static_cast<double>(n);
}

/// The ranks of some axes of a group's mesh, which are neighbours.
template <class Chosen>
Group group_over(const GroupShape& shape, const Job& job, Chosen&& chosen) {
  std::int64_t size = 1;
  std::int64_t stride = job.ranks;
  for (std::size_t axis = 0; axis < shape.axis_sizes.size(); ++axis) {
    if (shape.axis_sizes[axis] > 1 && chosen(axis)) {
      size *= shape.axis_sizes[axis];
      stride = std::min(stride, shape.axis_strides[axis]);
    }
  }
  return group_of(size, stride, job.ranks_per_host);
}

class UnitPricer {
 public:
  UnitPricer(const Job& job, const Gpu& gpu) : job_(job), gpu_(gpu) {}

  UnitPrices price(const UnitPlan& unit) const {
    UnitPrices prices;
    for (const GroupPlan& group : unit.groups) {
      add_weights(group, prices);
      add_gradients(group, prices);
      const GroupShape& shape = group.shape;
      const double numel = as_double(group.bytes.numel);
      const double moved =
          2 * as_double(shape.sizes.main) +
          2 * as_double(job_.optimizer_states) * sizeof(float) +
          as_double(shape.sizes.gradient) +
          (group.bytes.compute > 0 ? as_double(shape.sizes.compute) : 0);
      prices.optimizer += gpu_.pass_seconds("optimizer", numel * moved);
      prices.norm +=
          gpu_.pass_seconds("sum", numel * as_double(shape.sizes.gradient));
    }
    return prices;
  }

 private:
  void add_weights(const GroupPlan& group, UnitPrices& prices) const {
    const GroupShape& shape = group.shape;
    const Strategy& strategy = shape.strategy;
    const bool fp8 = shape.float8.has_value();
    const double element = fp8 ? 1 : as_double(shape.sizes.compute);
    const double whole = as_double(group.plane_layout.numel()) * element;
    const Group sharded = group_over(shape, job_, [&](std::size_t axis) {
      return strategy.parameter[axis].is_shard();
    });
    if (!group.resident) {
      Gathers& gather = fp8 ? prices.float8 : prices.compute;
      gather.by_collective +=
          seconds(gpu_, Transfer::all_gather, whole, sharded);
      gather.by_copies += copy_seconds(gpu_, whole, sharded);
      if (!shape.keep_compute_weights && !fp8) {
        prices.cast += gpu_.pass_seconds(
            "copy",
            as_double(group.bytes.numel) *
                as_double(shape.sizes.main + shape.sizes.compute));
      }
    }
    const Group spread = group_over(shape, job_, [&](std::size_t axis) {
      return strategy.optimizer[axis].is_shard() &&
             !strategy.parameter[axis].is_shard();
    });
    const double of_rank = whole / as_double(sharded.size);
    prices.spread += seconds(gpu_, Transfer::all_gather, of_rank, spread);
    if (fp8) {
      prices.encode += gpu_.pass_seconds(
          "quantize",
          as_double(group.bytes.numel) * as_double(shape.sizes.main + 1));
      prices.derive += gpu_.pass_seconds("quantize", 2 * whole);
    }
    if (group.post_forward_numel > 0) {
      const std::int64_t ranks = shape.post_forward_ranks;
      const double nbytes =
          as_double(group.post_forward_numel) * as_double(shape.sizes.compute);
      prices.from_post_forward += seconds(
          gpu_,
          Transfer::all_gather,
          whole,
          group_of(ranks, 1, job_.ranks_per_host));
      prices.save_post_forward += gpu_.pass_seconds("copy", 2 * nbytes);
    }
  }

  void add_gradients(const GroupPlan& group, UnitPrices& prices) const {
    const GroupShape& shape = group.shape;
    const Strategy& strategy = shape.strategy;
    const double whole =
        as_double(group.layout.numel()) * as_double(shape.sizes.reduce);
    prices.accumulate += gpu_.pass_seconds(
        "sum",
        whole + 2 * as_double(group.layout.numel()) *
                    as_double(job_.main_grads_size));
    const auto is_inner = [&](std::size_t axis) {
      return !group.has_outer_stage || axis > 0;
    };
    const auto is_sharded = [&](std::size_t axis) {
      return strategy.optimizer[axis].is_shard();
    };
    // What is not sharded in the end is reduced by an all-reduce.
    const Group scattered = group_over(shape, job_, [&](std::size_t axis) {
      return is_inner(axis) && is_sharded(axis);
    });
    const Group replicated = group_over(shape, job_, [&](std::size_t axis) {
      return is_inner(axis) && !is_sharded(axis);
    });
    const double rest = whole / as_double(scattered.size);
    double inner = 0;
    if (job_.copy_reductions && scattered.size > 1) {
      inner += copied_reduction_seconds(gpu_, whole, scattered);
    } else {
      inner += seconds(gpu_, Transfer::reduce_scatter, whole, scattered);
    }
    inner += seconds(gpu_, Transfer::all_reduce, rest, replicated);
    prices.reduce += inner;
    prices.reduce_last += inner;
    if (shape.sizes.gradient != shape.sizes.reduce || scattered.size == 1) {
      prices.reduce_sum += gpu_.pass_seconds(
          "sum",
          as_double(group.bytes.numel) *
              as_double(shape.sizes.gradient + shape.sizes.reduce));
    }
    if (group.has_outer_stage) {
      const Group outer =
          group_over(shape, job_, [](std::size_t axis) { return axis == 0; });
      prices.outer += seconds(
          gpu_,
          is_sharded(0) ? Transfer::reduce_scatter : Transfer::all_reduce,
          rest,
          outer);
    }
  }

  const Job& job_;
  const Gpu& gpu_;
};

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
    const UnitPricer pricer(job, gpu);
    const UnitPricer slowed_pricer(job, slowed_gpu_);
    for (const UnitPlan& unit : units) {
      specs_.push_back(unit.spec);
      prices_.push_back(pricer.price(unit));
      slowed_prices_.push_back(slowed_pricer.price(unit));
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
        .slot_nbytes = places_.arena_nbytes(),
        .peak_nbytes = most_,
        .activation_nbytes = most_activations_};
  }

 private:
  /// A use of memory in the arena, as SlotPool has them.
  struct Tenant {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool held = false;
    std::vector<int> last_use;
  };
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
    places_ = SlotPlan::build(
        slot_lifetimes(specs_, simulate_step(specs_, job_.scheduler)));
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
    if (!has_all_places(places_, lifetimes) || job_.overlap.interleave) {
      places_ = SlotPlan::build(lifetimes);
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
    const auto add = [&](const Kernels& kernels) {
      for (const Kernel& kernel : kernels) {
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
    if (!is_exchange) {
      operation.waits = std::exchange(pending_, {});
    }
    if (waits_[position] >= 0 &&
        step_operation_[waits_[position]] != kNoOperation) {
      operation.waits.push_back(step_operation_[waits_[position]]);
    }
    before(step);
    step_operation_[position] = is_exchange
                                    ? exchange(step, std::move(operation))
                                    : queue(std::move(operation));
    host_ += host_seconds(step);
  }

  /// The transfer of rows, and the kernel that permutes or adds them up: before
  /// it where rows leave in the order of tokens, else after it.
  /// @param kernel  that one.
  /// @return        the last of both.
  int exchange(const PlanStep& step, Operation kernel) {
    const bool forward =
        step.pass == PlanPass::forward || step.pass == PlanPass::recompute;
    const bool dispatch = step.node == PlanNode::dispatch;
    const Group group = group_of(job_.exchange_ranks, 1, job_.ranks_per_host);
    kernel.what = dispatch ? "dispatch" : "combine";
    Operation transfer = kernel;
    transfer.link = job_.copy_exchange ? Link::copies : Link::collectives;
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

  /// Takes the place of a slot. @return the operations that it waits for.
  std::vector<int>
  acquire(const SlotKey& key, std::int64_t nbytes, std::int64_t& place) {
    std::vector<int> waits;
    const std::int64_t begin = places_.offset(key);
    if (begin < 0 || nbytes == 0) {
      place = -1;
      return waits;
    }
    const std::int64_t end = begin + nbytes;
    for (const Tenant& tenant : tenants_) {
      if (tenant.begin < end && begin < tenant.end) {
        waits.insert(
            waits.end(),
            tenant.last_use.begin(),
            tenant.last_use.end());
      }
    }
    std::erase_if(tenants_, [&](const Tenant& tenant) {
      return tenant.begin >= begin && tenant.end <= end;
    });
    tenants_.push_back({begin, end, true, {}});
    place = begin;
    return waits;
  }

  void give_back(std::int64_t& place, std::vector<int> last_use) {
    if (place < 0) {
      return;
    }
    const auto tenant = std::ranges::find_if(tenants_, [&](const Tenant& t) {
      return t.held && t.begin == place;
    });
    if (tenant != tenants_.end()) {
      tenant->held = false;
      tenant->last_use = std::move(last_use);
    }
    place = -1;
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
        const auto waits = acquire(
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
        give_back(states_[action.unit].grads, {states_[action.unit].reduced});
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
    return acquire(
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
    give_back(held.begin, std::move(last_use));
  }

  void reduce(const Action& action, int microbatch) {
    const UnitPrices& prices = prices_[action.unit];
    const UnitPrices& slowed = slowed_prices_[action.unit];
    UnitState& state = states_[action.unit];
    const bool last_one = action.is_last;
    Operation operation{
        .stream = Stream::reduce,
        .link = job_.copy_reductions ? Link::copies : Link::collectives,
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
  SlotPlan places_;
  std::vector<UnitId> first_units_;
  std::vector<Action> prefetched_;
  std::optional<Scheduler> scheduler_;

  std::vector<Operation> operations_;
  std::array<int, kNumStreams> last_{
      kNoOperation,
      kNoOperation,
      kNoOperation,
      kNoOperation,
      kNoOperation};
  std::vector<int> pending_;  ///< what the next operation of compute waits for
  std::vector<int> step_operation_;  ///< by position
  std::vector<Tenant> tenants_;
  std::vector<std::vector<Weights>> weights_;  ///< by unit and slice
  std::vector<UnitState> states_;

  double host_ = 0;
  std::map<std::string, double> kinds_;
  std::int64_t activations_ = 0;
  std::int64_t gradients_ = 0;
  std::int64_t most_ = 0;
  std::int64_t most_activations_ = 0;
};

/// Length of the union of spans.
double covered(std::vector<Span> spans) {
  std::ranges::sort(spans, {}, &Span::begin);
  double sum = 0;
  double end = 0;
  for (const Span& span : spans) {
    const double from = std::max(end, span.begin);
    sum += std::max(0.0, span.end - from);
    end = std::max(end, span.end);
  }
  return sum;
}

StepPlan simulate(
    const Job& job,
    int microbatches,
    const std::vector<UnitPlan>& units,
    const Gpu& gpu) {
  StepWriter writer(job, microbatches, units, gpu);
  writer.write_step();
  const int first = writer.write_step();
  StepPlan step = writer.summary();
  const std::vector<Operation> all = writer.take();
  const std::vector<Span> spans = run_streams(all, gpu.contention);
  // A step ends with the optimizer, which is the last on compute.
  double begin = 0;
  double end = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].stream == Stream::compute) {
      double& of_step = static_cast<int>(i) < first ? begin : end;
      of_step = std::max(of_step, spans[i].end);
    }
  }
  std::vector<Span> busy;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Span span{spans[i].begin - begin, spans[i].end - begin};
    if (all[i].stream != Stream::compute && static_cast<int>(i) >= first) {
      step.transfers[all[i].what] += all[i].seconds;
    }
    if (span.end <= 0 || span.begin >= end - begin || all[i].seconds == 0) {
      continue;
    }
    if (all[i].stream == Stream::compute) {
      busy.push_back({std::max(0.0, span.begin), span.end});
    }
    step.operations.push_back(all[i]);
    step.operations.back().waits.clear();
    step.spans.push_back(span);
  }
  step.device_seconds = end - begin;
  step.compute_seconds = covered(busy);
  step.exposed_seconds = step.device_seconds - step.compute_seconds;
  step.seconds = std::max(step.device_seconds, step.host_seconds);
  step.shown_microbatches = microbatches;
  return step;
}

void extend(
    std::map<std::string, double>& values,
    const std::map<std::string, double>& before,
    double more) {
  for (auto& [key, value] : values) {
    const auto found = before.find(key);
    value += more * (value - (found == before.end() ? 0 : found->second));
  }
}

}  // namespace

StepPlan
plan_step(const Job& job, const std::vector<UnitPlan>& units, const Gpu& gpu) {
  if (job.microbatches <= kMostSimulated) {
    return simulate(job, job.microbatches, units, gpu);
  }
  // What one microbatch more takes, every further one takes too.
  const StepPlan before = simulate(job, kMostSimulated - 1, units, gpu);
  StepPlan step = simulate(job, kMostSimulated, units, gpu);
  const double more = job.microbatches - kMostSimulated;
  const auto extend_value = [&](double StepPlan::*member) {
    step.*member += more * (step.*member - before.*member);
  };
  extend_value(&StepPlan::device_seconds);
  extend_value(&StepPlan::host_seconds);
  extend_value(&StepPlan::compute_seconds);
  extend_value(&StepPlan::exposed_seconds);
  extend(step.kinds, before.kinds, more);
  extend(step.transfers, before.transfers, more);
  step.seconds = std::max(step.device_seconds, step.host_seconds);
  return step;
}

}  // namespace flatshard::plan
