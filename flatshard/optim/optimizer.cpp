#include "flatshard/optim/optimizer.h"

#include "flatshard/comm/launch_order.h"
#include "flatshard/core/error.h"
#include "flatshard/group/weight_write.h"
#include "flatshard/optim/moments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>

namespace flatshard {
namespace {

std::vector<ParamGroup*> trainable(const std::vector<ParamGroup*>& groups) {
  std::vector<ParamGroup*> trained;
  for (ParamGroup* group : groups) {
    if (group->trainable()) {
      trained.push_back(group);
    }
  }
  return trained;
}

}  // namespace

Optimizer::Optimizer(std::vector<ParamGroup*> groups)
    : groups_(trainable(groups)), parts_(groups_.size()) {
  for (const ParamGroup* group : groups_) {
    updates_.emplace_back(group->parameters().size());
  }
}

Optimizer::Optimizer(
    std::vector<ParamGroup*> groups,
    const ParameterRules& rules,
    const StateOffload& offload)
    : Optimizer(
          trainable(groups),
          flatshard::parameter_groups(trainable(groups), rules),
          offload) {
}

Optimizer::Optimizer(
    std::vector<ParamGroup*> groups,
    ParameterGroups parameters,
    const StateOffload& offload)
    : Optimizer(std::move(groups)) {
  parameters_ = std::move(parameters);
  if (offload.enabled && !groups_.empty()) {
    offloaded_ = std::make_unique<OffloadedStates>(
        groups_.front()->mesh()->device(),
        offload.streams);
  }
  for (const ParameterGroupValues& group : parameters_.groups) {
    group.values.validate();
    FLATSHARD_CHECK(
        !offload.enabled || group.values.algorithm != Algorithm::muon,
        config,
        "optimizer.offload_states: states of Muon cannot be offloaded; use "
        "adamw or sgd, or offload_states = false");
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    FLATSHARD_CHECK(
        i < parameters_.of_parameters.size() &&
            parameters_.of_parameters[i].size() ==
                groups_[i]->parameters().size(),
        usage,
        "expected a parameter group for each of {} parameters of {}",
        groups_[i]->parameters().size(),
        groups_[i]->name());
    add_parts(i);
  }
  for (auto& [name, algorithm] : algorithms_) {
    algorithm->finish_groups();
  }
  if (offloaded_) {
    allocate_offloaded();
  }
}

void Optimizer::allocate_offloaded() {
  std::vector<std::vector<at::Tensor*>> states(groups_.size());
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (const PartUpdate& part : parts_[i]) {
      if (offloads_states(*groups_[i])) {
        algorithms_.at(part.algorithm())
            ->visit_states(i, [&](at::Tensor& state) {
              states[i].push_back(&state);
            });
      }
    }
  }
  offloaded_->allocate(states);
}

void Optimizer::add_parts(std::size_t group) {
  const ParamGroup& g = *groups_[group];
  const std::vector<std::size_t>& of_parameters =
      parameters_.of_parameters[group];
  const at::Tensor& main = g.weights().main().local();
  for (UpdatePart& of :
       update_parts(trained_group(g), of_parameters, parameters_)) {
    auto& own = algorithms_[of.algorithm];
    if (own == nullptr) {
      own = make_algorithm(of.algorithm, parameters_.muon);
    }
    // Without memory until the sizes of all states are known.
    own->set_state_device(
        offloads_states(g) ? at::Device(at::kMeta) : main.device());
    const std::vector<ParameterValues> values = values_of(of.rows, parameters_);
    const PartUpdate& part = parts_[group].emplace_back(g, std::move(of));
    own->add_group(
        group,
        main.narrow(0, 0, part.flat.states_numel(main.numel())),
        values);
    std::vector<UpdateAlgorithm::OwnParameter> parameters;
    for (std::size_t i = 0; i < part.row_of().size(); ++i) {
      if (part.row_of()[i] != UpdateRange::kSkipped) {
        parameters.push_back({i, part.row_of()[i]});
      }
    }
    own->add_parameters(group, g, parameters, values);
  }
}

bool Optimizer::begin_update(
    std::size_t group,
    const std::vector<bool>& skipped) {
  bool any = false;
  for (PartUpdate& part : parts_[group]) {
    part.begin(skipped, updates_[group]);
    any = any || !part.is_empty();
  }
  return any;
}

std::uint64_t Optimizer::rounding_step(std::size_t group) const {
  // Without a larger maximum, somebody's distance to it became smaller.
  const std::vector<std::int64_t>& updates = updates_[group];
  const std::int64_t most = *std::ranges::max_element(updates);
  std::uint64_t behind = 0;
  for (const std::int64_t own : updates) {
    behind += static_cast<std::uint64_t>(most - own);
  }
  return behind << 32 | static_cast<std::uint32_t>(most);
}

void Optimizer::set_values(
    std::size_t parameter_group,
    const ParameterValues& values) {
  ParameterGroupValues& group = parameters_.groups.at(parameter_group);
  values.validate();
  FLATSHARD_CHECK(
      values.algorithm == group.values.algorithm &&
          values.state_dtype == group.values.state_dtype &&
          (values.algorithm != Algorithm::sgd ||
           (values.momentum > 0) == (group.values.momentum > 0)),
      usage,
      "parameter group {}: the algorithm, the state_dtype, or SGD's momentum "
      "of 0 cannot change after the optimizer was made; make another one",
      group.title);
  group.values = values;
}

std::vector<UpdateRow> Optimizer::set_rows(
    const std::vector<std::size_t>& groups,
    double lr) {
  std::vector<UpdateRow> on_device;
  for (const std::size_t i : groups) {
    for (PartUpdate& part : parts_[i]) {
      part.set_rows(*algorithms_.at(part.algorithm()), parameters_, lr);
      if (part.flat.device_ranges.defined()) {
        const std::vector<UpdateRow>& rows = part.flat.rows;
        on_device.insert(on_device.end(), rows.begin(), rows.end());
      }
    }
  }
  return on_device;
}

void Optimizer::set_device_rows(
    const std::vector<std::size_t>& groups,
    const at::Tensor& device_rows) {
  constexpr auto kNbytes = static_cast<std::int64_t>(sizeof(UpdateRow));
  std::int64_t begin = 0;
  for (const std::size_t i : groups) {
    for (PartUpdate& part : parts_[i]) {
      if (part.flat.device_ranges.defined()) {
        const auto nbytes =
            static_cast<std::int64_t>(part.flat.rows.size()) * kNbytes;
        part.flat.device_rows = device_rows.narrow(0, begin, nbytes);
        begin += nbytes;
      }
    }
  }
}

void Optimizer::begin_step(const std::vector<std::size_t>& groups, double lr) {
  for (auto& [name, algorithm] : algorithms_) {
    algorithm->begin_step();
  }
  for (const std::size_t i : groups) {
    for (const PartUpdate& part : parts_[i]) {
      if (!part.is_empty()) {
        algorithms_.at(part.algorithm())
            ->begin_update(
                i,
                part.flat,
                part.row_of(),
                part.values(parameters_),
                lr);
      }
    }
  }
}

std::vector<Communicator*> Optimizer::communicators(std::size_t group) const {
  std::vector<Communicator*> all;
  for (const PartUpdate& part : parts_[group]) {
    if (!part.is_empty()) {
      const auto own = algorithms_.at(part.algorithm())->communicators(group);
      all.insert(all.end(), own.begin(), own.end());
    }
  }
  return all;
}

bool Optimizer::encodes_planes(std::size_t group) const {
  // A kernel does not see the magnitudes of elements that it skips.
  const std::vector<PartUpdate>& parts = parts_[group];
  return parts.size() == 1 && parts.front().is_whole() &&
         algorithms_.at(parts.front().algorithm())->encodes_planes(group);
}

void Optimizer::set_stochastic_rounding(std::uint64_t seed) {
  wait();  // the last step may still read the ranges
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const at::Tensor& main = groups_[i]->weights().main().local();
    if (main.scalar_type() != at::kBFloat16) {
      continue;
    }
    for (PartUpdate& part : parts_[i]) {
      part.set_stochastic_rounding(seed);
    }
  }
}

void Optimizer::wait() const {
  if (!groups_.empty()) {
    updated_.wait(*current_stream(groups_.front()->mesh()->device()));
  }
}

void Optimizer::wait_for_states() const {
  if (offloaded_) {
    offloaded_->wait();
  }
}

void Optimizer::prefetch_states() {
  if (!offloaded_) {
    return;
  }
  std::vector<std::size_t> groups;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i]->gradients().reduced().exists()) {
      groups.push_back(i);
    }
  }
  offloaded_->prefetch(groups);
}

void Optimizer::step(
    double lr,
    const at::Tensor& grad_scale,
    const OfParameters& without_gradient) {
  const at::NoGradGuard no_grad;
  for (const ParamGroup* group : groups_) {
    FLATSHARD_CHECK(
        !group->gradients().has_unreduced(),
        usage,
        "gradients of {} wait for the last microbatch: run its backward with "
        "is_last_microbatch and sync on before the optimizer steps",
        group->name());
  }
  wait();  // for a step whose weights were never used
  ++num_steps_;
  if (groups_.empty()) {
    return;
  }
  const auto current = current_stream(groups_.front()->mesh()->device());
  Stream& stream = stream_ ? *stream_ : *current;
  std::vector<ParamGroup*> written;
  std::vector<std::size_t> updated;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i]->gradients().reduced().exists() &&
        begin_update(
            i,
            without_gradient.empty() ? std::vector<bool>()
                                     : without_gradient.at(i))) {
      written.push_back(groups_[i]);
      updated.push_back(i);
    }
  }
  WeightWrite write(std::move(written), stream);
  std::vector<UpdateRow> rows = set_rows(updated, lr);
  if (!rows.empty()) {
    stream.submit([this, updated, rows = std::move(rows)] {
      const at::Device device = groups_.front()->mesh()->device();
      set_device_rows(updated, upload_rows(rows, device));
    });
  }
  at::Tensor scale_on_host;  // waits for the device once, if at all
  const auto host_scale = [&] {
    if (grad_scale.defined() && !scale_on_host.defined()) {
      scale_on_host = grad_scale.cpu();
    }
    return scale_on_host;
  };
  std::vector<bool> encodes(groups_.size());
  for (const std::size_t i : updated) {
    ParamGroup& group = *groups_[i];
    const bool offload = group.options().offload;
    const PlaneWriter* const planes =
        encodes_planes(i) ? group.weights().writer() : nullptr;
    encodes[i] = planes != nullptr || !group.weights().encodes_at_gather();
    for (PartUpdate& part : parts_[i]) {
      FlatUpdate& flat = part.flat;  // the last step is done with it
      flat.rounding_step = rounding_step(i);
      flat.main = group.weights().main().local();
      flat.compute = offload ? at::Tensor() : group.weights().compute_shard();
      flat.grad = group.gradients().reduced().local();
      flat.grad_scale = offload ? host_scale() : grad_scale;
      flat.planes = planes != nullptr ? *planes : PlaneWriter();
    }
  }
  begin_step(updated, lr);
  if (offloaded_) {
    offloaded_->begin_step(updated);
  }
  for (const std::size_t i : updated) {
    ParamGroup& group = *groups_[i];
    const bool offload = group.options().offload;
    const at::Tensor slot =
        offloaded_ ? offloaded_->begin_update(i, stream) : at::Tensor();
    queue_collectives(stream, communicators(i), [this, i, slot] {
      for (PartUpdate& part : parts_[i]) {
        UpdateAlgorithm& algorithm = *algorithms_.at(part.algorithm());
        part.flat.planes.zero();
        algorithm.set_states(i, part.flat);
        if (slot.defined()) {
          offloaded_->use_slot(i, slot, part.flat);
        }
        if (!part.is_empty()) {
          algorithm.update(i, part.flat);
        }
        part.flat.grad.reset();  // zero_grad gives its memory back
      }
    });
    if (offloaded_) {
      offloaded_->end_update(i, stream);
    }
    write.end(
        group,
        offload || !encodes[i] ? WeightWrite::Cast::here
                               : WeightWrite::Cast::by_writer);
  }
  updated_.record(stream);
}

void Optimizer::zero_grad() {
  for (ParamGroup* group : groups_) {
    group->gradients().zero();
  }
}

std::vector<std::pair<std::string, at::Tensor>> Optimizer::state(
    std::size_t group) const {
  std::vector<std::pair<std::string, at::Tensor>> states;
  for (const PartUpdate& part : parts_.at(group)) {
    for (auto& state : algorithms_.at(part.algorithm())->state(group)) {
      states.push_back(std::move(state));
    }
  }
  return states;
}

std::vector<std::pair<std::string, std::vector<NamedShard>>>
Optimizer::state_shards(std::size_t group) const {
  std::vector<std::pair<std::string, std::vector<NamedShard>>> result;
  for (const PartUpdate& part : parts_.at(group)) {
    const UpdateAlgorithm& algorithm = *algorithms_.at(part.algorithm());
    auto own = algorithm.state_shards(group);
    if (!own.empty()) {
      std::ranges::move(own, std::back_inserter(result));
      continue;
    }
    for (const auto& [name, flat] : algorithm.state(group)) {
      std::vector<NamedShard> shards = groups_[group]->main_shards();
      if (part.flat.runs) {
        std::erase_if(shards, [&](const NamedShard& shard) {
          return !part.contains(shard.name());
        });
      }
      for (NamedShard& shard : shards) {
        const std::int64_t n = shard.tensor.numel();
        const std::int64_t begin =
            n == 0 ? 0 : part.flat.states_offset(shard.local_offset);
        shard.tensor = flat.narrow(0, begin, n);
      }
      result.emplace_back(name, std::move(shards));
    }
  }
  return result;
}

std::int64_t Optimizer::state_nbytes() const {
  std::int64_t nbytes = offloaded_ ? offloaded_->device_nbytes() : 0;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (offloads_states(*groups_[i])) {
      continue;
    }
    for (const auto& [name, tensor] : state(i)) {
      nbytes += tensor.nbytes();
    }
  }
  return nbytes;
}

std::int64_t Optimizer::host_state_nbytes() const {
  return offloaded_ ? offloaded_->host_nbytes() : 0;
}

}  // namespace flatshard
