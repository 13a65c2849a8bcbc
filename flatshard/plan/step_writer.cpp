#include "flatshard/plan/step_writer.h"

#include "flatshard/core/error.h"
#include "flatshard/plan/links.h"
#include "flatshard/plan/step_events.h"
#include "flatshard/plan/unit_operations.h"
#include "flatshard/schedule/prefetch.h"
#include "flatshard/schedule/simulate.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

namespace flatshard::plan {
namespace {

constexpr double kMicroSecond = 1e-6;

/// Returns whether a plan has a place for every slot that these actions
/// acquire: else the runtime makes a new plan.
bool has_all_places(
    const SlotPlan& plan,
    const std::vector<SlotLifetime>& lifetimes) {
  return std::ranges::all_of(lifetimes, [&](const SlotLifetime& life) {
    return life.nbytes == 0 || plan.offset(life.key) >= 0;
  });
}

/// Writes the nodes of a plan and the actions of its events as operations.
class StepWriter {
 public:
  StepWriter(
      const Job& job,
      int microbatches,
      const std::vector<UnitPlan>& units,
      const Gpu& gpu)
      : job_(job),
        gpu_(gpu),
        slowed_gpu_(with_slowed_links(gpu)),
        plan_(overlap_plan(num_layers(), microbatches, job.overlap)),
        waits_(plan_.size(), kNoOperation),
        units_(job, units, gpu_, slowed_gpu_, record_) {
    events_ = step_events(plan_, job, units_.specs());
    for (const PlanWait& wait : plan_waits(plan_, num_layers(), job.overlap)) {
      waits_[wait.waiter] = wait.earlier;
    }
    plan_slots();
    scheduler_.emplace(units_.specs(), job_.scheduler);
  }

  /// Writes one more step. @return the first operation of it.
  int write_step() {
    const int first = record_.begin_step();
    units_.begin_step();
    step_operation_.assign(plan_.size(), kNoOperation);
    for (std::size_t i = 0; i < plan_.size(); ++i) {
      write(static_cast<int>(i));
    }
    units_.update();
    carry_out(scheduler_->on({.kind = EventKind::weights_changed}), 0);
    carry_out(prefetch(*scheduler_), 0);
    return first;
  }

  std::vector<Operation> take() { return record_.take_operations(); }
  /// Returns the totals of the last step.
  StepPlan summary() const {
    StepPlan step = record_.totals();
    step.slot_nbytes = units_.slots().arena_nbytes();
    return step;
  }

 private:
  int num_layers() const {
    return static_cast<int>(job_.plan_units.layers.size());
  }

  /// Returns the actions that unshard the first units for the next step.
  std::vector<Action> prefetch(Scheduler& scheduler) const {
    std::vector<Action> actions;
    for (const UnitId unit : first_units_) {
      std::ranges::copy(
          scheduler.on(prefetch_event(unit)),
          std::back_inserter(actions));
    }
    return actions;
  }

  // The actions of a steady step decide where slots are.
  void plan_slots() {
    const std::vector<UnitSpec>& specs = units_.specs();
    units_.use_slots(SlotPlan::build(
        slot_lifetimes(specs, simulate_step(specs, job_.scheduler))));
    Scheduler scheduler(specs, job_.scheduler);
    std::vector<Action> prefetched;
    std::vector<Action> actions;
    for (int step = 0; step < 2; ++step) {
      // The prefetched uses start before the step that is planned.
      actions = prefetched;
      const auto add = [&](const std::vector<Action>& more) {
        actions.insert(actions.end(), more.begin(), more.end());
      };
      for (const auto& of_position : events_) {
        for (const ScheduleEvent& event : of_position) {
          add(scheduler.on(event));
        }
      }
      if (step == 0) {
        first_units_ = first_gathered(actions, job_.scheduler.prefetch);
      }
      add(scheduler.on({.kind = EventKind::weights_changed}));
      prefetched = prefetch(scheduler);
      add(prefetched);
    }
    const auto lifetimes = slot_lifetimes(specs, actions);
    if (!has_all_places(units_.slots(), lifetimes) ||
        job_.overlap.in_flight > 1) {
      units_.use_slots(SlotPlan::build(lifetimes));
    }
  }

  // -- nodes ------------------------------------------------------------------

  const LayerWork& layer_of(const PlanStep& step) const {
    return step.layer < 0 ? job_.ends
                          : job_.layer_kinds[job_.kind_of_layer[step.layer]];
  }

  void carry_out(const std::vector<Action>& actions, int microbatch) {
    for (const Action& action : actions) {
      units_.carry_out(action, microbatch);
    }
  }

  void write(int position) {
    const PlanStep& step = plan_[position];
    bool computed = false;
    for (const ScheduleEvent& event : events_[position]) {
      if (!comes_before_kernels(event.kind) && !std::exchange(computed, true)) {
        compute(position);
      }
      carry_out(scheduler_->on(event), step.microbatch);
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
    Operation operation{
        .unit = job_.plan_units.unit_of(step),
        .microbatch = step.microbatch};
    const bool is_exchange = step.stream() == PlanStream::exchange;
    operation.stream = is_exchange ? Stream::exchange : Stream::compute;
    if (!is_exchange) {
      operation.waits = record_.take_compute_waits();
      if (const int update = units_.update_of(operation.unit);
          update != kNoOperation) {
        operation.waits.push_back(update);
      }
    }
    if (waits_[position] >= 0 &&
        step_operation_[waits_[position]] != kNoOperation) {
      operation.waits.push_back(step_operation_[waits_[position]]);
    }
    std::vector<int> under_way;
    double num_kernels = 0;
    double launches = 0;
    const bool again = step.pass == PlanPass::recompute;
    const auto add = [&](const Kernels& kernels) {
      for (const Kernel& kernel : kernels) {
        if (again && kernel.is_kept) {
          continue;
        }
        if (kernel.is_exchange()) {
          share(kernel, operation, under_way);
          continue;
        }
        num_kernels += 1;
        launches += kernel.runs;
        const double taken = kernel.seconds(gpu_);
        operation.seconds += taken;
        record_.add_kernel_seconds(std::string(kernel.label()), taken);
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
                                    : record_.queue(std::move(operation));
    record_.add_host_seconds(
        host_seconds(step, num_kernels == 0 ? 1 : launches / num_kernels));
  }

  /// Ends an operation of compute where ranks exchange activations, and starts
  /// the next one. The next one may wait for them.
  /// @param under_way  transfers that overlap, the oldest first.
  void
  share(const Kernel& at, Operation& operation, std::vector<int>& under_way) {
    Operation rest = operation;
    rest.seconds = 0;
    rest.waits.clear();
    const int before = record_.queue(std::move(operation));
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
    const std::int64_t head_ranks = job_.context_ranks / job_.context_hosts;
    const bool of_heads =
        !at.is_over_hosts && at.transfer == Transfer::all_to_all;
    const bool copies =
        of_heads ? job_.copy_heads : !at.is_over_hosts && job_.copy_activations;
    const Group group =
        at.is_over_hosts ? group_of(
                               job_.context_hosts,
                               head_ranks * job_.context_stride,
                               job_.ranks_per_host)
        : of_heads
            ? group_of(head_ranks, job_.context_stride, job_.ranks_per_host)
            : group_of(job_.tensor_ranks, 1, job_.ranks_per_host);
    const auto price = [&](const Gpu& gpu) {
      return at.runs * (!copies
                            ? plan::seconds(gpu, at.transfer, at.nbytes, group)
                        : at.transfer == Transfer::reduce_scatter
                            ? copied_reduction_seconds(gpu, at.nbytes, group)
                            : copy_seconds(gpu, at.nbytes, group));
    };
    const int transfer = record_.queue(
        {.stream = Stream::tensor,
         .link = copies ? Link::copies : Link::collectives,
         .leaves_host = group.hosts() > 1,
         .seconds = price(gpu_),
         .beside_compute = price(slowed_gpu_),
         .waits = {before},
         .what = at.transfer == Transfer::all_to_all   ? "CP all-to-all"
                 : at.is_over_hosts                    ? "CP all-gather"
                 : at.transfer == Transfer::all_gather ? "TP all-gather"
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
    const Group group = group_of(job_.exchange_axes, job_.ranks_per_host);
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
      record_.queue(std::move(kernel));
      return record_.queue(std::move(transfer));
    }
    record_.queue(std::move(transfer));
    return record_.queue(std::move(kernel));
  }

  /// @param runs  of a kernel, on average.
  double host_seconds(const PlanStep& step, double runs) const {
    const bool is_exchange = step.stream() == PlanStream::exchange;
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
    return runs * share * kMicroSecond *
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
      record_.add_activations(
          job_.overlap.recomputes(step.layer) ? layer.input_nbytes
                                              : layer.saved_nbytes);
    } else if (step.pass == PlanPass::recompute) {
      record_.add_activations(layer.saved_nbytes - layer.input_nbytes);
    }
    record_.note_peak(
        step.pass == PlanPass::backward ? layer.transient_nbytes : 0);
  }

  void after(const PlanStep& step) {
    if (step.pass == PlanPass::backward && is_first_of_layer(step)) {
      record_.add_activations(-layer_of(step).saved_nbytes);
    }
  }

  const Job& job_;
  const Gpu& gpu_;
  const Gpu slowed_gpu_;
  std::vector<PlanStep> plan_;
  std::vector<int> waits_;  ///< by position: the step that it waits for
  StepRecord record_;
  UnitOperations units_;
  std::vector<std::vector<ScheduleEvent>> events_;  ///< by position
  std::vector<UnitId> first_units_;
  std::optional<Scheduler> scheduler_;
  std::vector<int> step_operation_;  ///< by position
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
