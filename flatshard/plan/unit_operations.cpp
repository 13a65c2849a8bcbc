#include "flatshard/plan/unit_operations.h"

#include <utility>

namespace flatshard::plan {
namespace {

void add_wait(std::vector<int>& waits, int operation) {
  if (operation != kNoOperation) {
    waits.push_back(operation);
  }
}

Stream update_stream(const Job& job) {
  return job.overlap_updates ? Stream::optimizer : Stream::compute;
}

}  // namespace

UnitOperations::UnitOperations(
    const Job& job,
    const std::vector<UnitPlan>& units,
    const Gpu& gpu,
    const Gpu& slowed_gpu,
    StepRecord& record)
    : job_(job),
      units_(units),
      gpu_(gpu),
      slowed_gpu_(slowed_gpu),
      record_(record),
      weights_(units.size()),
      states_(units.size()) {
  for (const UnitPlan& unit : units) {
    weights_[specs_.size()].resize(unit.spec.num_slices());
    specs_.push_back(unit.spec);
    prices_.push_back(price_unit(unit, job, gpu));
    slowed_prices_.push_back(price_unit(unit, job, slowed_gpu));
  }
}

void UnitOperations::begin_step() {
  for (UnitState& state : states_) {
    state.has_gradients = false;
    state.has_local = false;
  }
}

void UnitOperations::carry_out(const Action& action, int microbatch) {
  switch (action.kind) {
    case ActionKind::gather:
      gather(action, microbatch);
      break;
    case ActionKind::derive:
      derive(action, microbatch);
      break;
    case ActionKind::await:
      record_.compute_waits_for(
          weights_of(action.unit, action.plane, action.part).filled);
      break;
    case ActionKind::release:
      release(action);
      break;
    case ActionKind::acquire_grads:
      acquire_grads(action.unit);
      break;
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
      record_.compute_waits_for(record_.last(Stream::reduce));
      record_.compute_waits_for(record_.last(Stream::outer));
      break;
    case ActionKind::download:
      download(action, microbatch);
      break;
    case ActionKind::drain_download:
      record_.compute_waits_for(kept_.at(action.call).downloaded);
      record_.add_activations(-kept_.at(action.call).nbytes);
      break;
    case ActionKind::upload:
      upload(action, microbatch);
      break;
    case ActionKind::await_upload:
      record_.compute_waits_for(kept_.at(action.call).uploaded);
      break;
    case ActionKind::release_kept:
      // The layer's backward frees the memory.
      kept_.erase(action.call);
      break;
  }
}

UnitOperations::Weights&
UnitOperations::weights_of(UnitId unit, PlaneId plane, PartId part) {
  return weights_[unit][specs_[unit].slice(plane, part)];
}

std::vector<int> UnitOperations::take_slot(
    const Action& action,
    Weights& held) {
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

void UnitOperations::gather(const Action& action, int microbatch) {
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
    held.filled = record_.queue(std::move(operation));
    shards.read_by_gather = held.filled;
    return;
  }
  const bool compute_plane = action.plane == kComputePlane;
  const double share = action.part == kWhole
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
    record_.queue(
        {.stream = Stream::gather,
         .seconds = encode,
         .waits = operation.waits,
         .what = "encode",
         .unit = action.unit,
         .microbatch = microbatch});
  }
  held.filled = record_.queue(std::move(operation));
}

void UnitOperations::derive(const Action& action, int microbatch) {
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
    held.filled = record_.queue(std::move(operation));
    source.read_by_gather = held.filled;
  } else {
    record_.add_kernel_seconds("copy", operation.seconds);
    held.filled = record_.queue(std::move(operation));
  }
}

void UnitOperations::release(const Action& action) {
  Weights& held = weights_of(action.unit, action.plane, action.part);
  std::vector<int> last_use;
  add_wait(last_use, record_.last(Stream::compute));
  add_wait(last_use, held.filled);
  add_wait(last_use, std::exchange(held.read_by_gather, kNoOperation));
  places_.give_back(held.begin, std::move(last_use));
}

void UnitOperations::acquire_grads(UnitId unit) {
  for (const int operation : places_.acquire(
           {.unit = unit, .role = SlotRole::gradients},
           specs_[unit].grad_nbytes,
           states_[unit].grads)) {
    record_.compute_waits_for(operation);
  }
}

void UnitOperations::reduce(const Action& action, int microbatch) {
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
  add_wait(operation.waits, record_.last(Stream::compute));
  state.reduced = record_.queue(std::move(operation));
  if (prices.reduce_sum > 0) {
    state.reduced = record_.queue(
        {.stream = Stream::reduce,
         .seconds = prices.reduce_sum,
         .what = "sum of gradients",
         .unit = action.unit,
         .microbatch = microbatch});
  }
  const double outer = last_one ? prices.outer : prices.outer_early;
  if (outer > 0) {
    record_.queue(
        {.stream = Stream::outer,
         .link = prices.outer_by_copies ? Link::copies : Link::collectives,
         .leaves_host = prices.outer_leaves_host,
         .seconds = outer,
         .beside_compute = last_one ? slowed.outer : slowed.outer_early,
         .waits = {state.reduced},
         .what = "reduce over replicas",
         .unit = action.unit,
         .microbatch = microbatch});
  }
  if (!std::exchange(state.has_gradients, true)) {
    for (const GroupPlan& group : units_[action.unit].groups) {
      const GroupBytes bytes = group.bytes();
      record_.add_gradients(bytes.gradients);
      if (!last_one) {
        record_.add_gradients(bytes.inner);
      }
    }
    record_.note_peak();
  }
}

void UnitOperations::accumulate(UnitId unit, int microbatch) {
  UnitState& state = states_[unit];
  Operation operation{
      .stream = Stream::reduce,
      .seconds = prices_[unit].accumulate,
      .what = "sum of gradients",
      .unit = unit,
      .microbatch = microbatch};
  add_wait(operation.waits, record_.last(Stream::compute));
  state.reduced = record_.queue(std::move(operation));
  if (!std::exchange(state.has_local, true)) {
    for (const GroupPlan& group : units_[unit].groups) {
      record_.add_gradients(group.bytes().local);
    }
    record_.note_peak();
  }
}

void UnitOperations::download(const Action& action, int microbatch) {
  Operation copy{
      .stream = Stream::download,
      .link = Link::to_host,
      .seconds = host_copy_seconds(gpu_, as_double(action.nbytes)),
      .what = "download of activations",
      .unit = action.unit,
      .microbatch = microbatch};
  add_wait(copy.waits, record_.last(Stream::compute));
  kept_[action.call] = {
      .downloaded = record_.queue(std::move(copy)),
      .nbytes = action.nbytes};
}

void UnitOperations::upload(const Action& action, int microbatch) {
  Operation copy{
      .stream = Stream::upload,
      .link = Link::from_host,
      .seconds = host_copy_seconds(gpu_, as_double(action.nbytes)),
      .what = "upload of activations",
      .unit = action.unit,
      .microbatch = microbatch};
  add_wait(copy.waits, record_.last(Stream::compute));
  kept_.at(action.call).uploaded = record_.queue(std::move(copy));
  record_.add_activations(action.nbytes);
}

void UnitOperations::exchange_matrices(const MatrixWork& work) {
  if (work.exchange_nbytes == 0) {
    return;
  }
  const Group group = group_of(work.axes, job_.ranks_per_host);
  const auto price = [&](const Gpu& gpu) {
    return seconds(gpu, Transfer::all_to_all, work.exchange_nbytes, group);
  };
  Operation operation{
      .stream = Stream::reduce,
      .link = Link::collectives,
      .leaves_host = group.hosts() > 1,
      .seconds = price(gpu_),
      .beside_compute = price(slowed_gpu_),
      .waits = update_waits_,
      .what = "exchange of matrices"};
  add_wait(operation.waits, record_.last(update_stream(job_)));
  update_waits_.push_back(record_.queue(std::move(operation)));
}

/// Queues kernels of the optimizer.
int UnitOperations::queue_update(Operation operation) {
  operation.stream = update_stream(job_);
  operation.waits = std::exchange(update_waits_, {});
  return record_.queue(std::move(operation));
}

void UnitOperations::orthogonalize(const MatrixWork& work) {
  directions_nbytes_ += work.directions_nbytes;
  record_.note_peak(directions_nbytes_ + work.scratch_nbytes);
  exchange_matrices(work);
  const double taken = seconds(gpu_, work.kernels);
  record_.add_kernel_seconds("Newton-Schulz", taken);
  queue_update({.seconds = taken, .what = "Newton-Schulz"});
  exchange_matrices(work);
}

/// @param downloads  the earlier ones that slots wait for, the last one last.
void UnitOperations::update_unit(UnitId unit, std::vector<int>& downloads) {
  constexpr std::size_t kSlots = 2;
  const std::int64_t copied =
      job_.copied_states.empty() ? 0 : job_.copied_states[unit];
  Operation copy{.unit = unit};
  if (copied > 0) {
    copy.seconds = host_copy_seconds(gpu_, as_double(copied));
    copy.stream = Stream::upload;
    copy.link = Link::from_host;
    copy.what = "upload of states";
    if (downloads.size() >= kSlots) {
      copy.waits = {downloads[downloads.size() - kSlots]};
    }
    update_waits_.push_back(record_.queue(copy));
  }
  const double taken = seconds(gpu_, job_.updates[unit]);
  record_.add_kernel_seconds("optimizer", taken);
  states_[unit].updated =
      queue_update({.seconds = taken, .what = "optimizer", .unit = unit});
  if (copied > 0) {
    copy.stream = Stream::download;
    copy.link = Link::to_host;
    copy.what = "download of states";
    copy.waits = {states_[unit].updated};
    downloads.push_back(record_.queue(std::move(copy)));
  }
}

void UnitOperations::update() {
  double norm = 0;
  for (const UnitPrices& prices : prices_) {
    norm += prices.norm;
  }
  if (job_.clips) {
    record_.add_kernel_seconds("sum", norm);
    constexpr double kNumber = 4;
    norm += seconds(
        gpu_,
        Transfer::all_reduce,
        kNumber,
        group_of(job_.ranks, 1, job_.ranks_per_host));
    record_.queue(
        {.stream = Stream::compute,
         .seconds = norm,
         .waits = record_.take_compute_waits(),
         .what = "gradient norm"});
  }
  update_waits_ = record_.take_compute_waits();
  if (job_.overlap_updates) {
    for (const int earlier : update_waits_) {
      record_.compute_waits_for(earlier);
    }
    add_wait(update_waits_, record_.last(Stream::compute));
  }
  std::vector<int> downloads;  // both slots wait for the last step
  add_wait(downloads, record_.last(Stream::download));
  add_wait(downloads, record_.last(Stream::download));
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const auto unit = static_cast<UnitId>(u);
    for (const MatrixWork& work : job_.matrices) {
      if (work.first == unit) {
        orthogonalize(work);
      }
    }
    update_unit(unit, downloads);
    for (const MatrixWork& work : job_.matrices) {
      directions_nbytes_ -= work.last == unit ? work.directions_nbytes : 0;
    }
  }
}

}  // namespace flatshard::plan
