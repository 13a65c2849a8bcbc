#include "flatshard/optim/optimizer.h"

#include "flatshard/core/error.h"
#include "flatshard/group/weight_write.h"

#include <ATen/ATen.h>

#include <map>

namespace flatshard {
namespace {

// Returns the weight decay of each parameter by its attribute.
std::vector<double> decays_by_attribute(
    const ParamGroup& group,
    double weight_decay) {
  std::vector<double> decays;
  for (const GroupParameter& p : group.parameters()) {
    const auto attribute = p.attributes.find(kWeightDecayAttribute);
    const bool none =
        attribute != p.attributes.end() && attribute->second == "none";
    FLATSHARD_CHECK(
        none || attribute == p.attributes.end(),
        config,
        "parameter {}: expected attribute {} to be \"none\" or absent, got "
        "\"{}\"",
        p.names.front(),
        kWeightDecayAttribute,
        attribute->second);
    decays.push_back(none ? 0.0 : weight_decay);
  }
  return decays;
}

// Returns the runs of equal decay over the flat shard. Padding has the decay
// of the elements before it: it is zero and stays zero.
std::vector<DecayRange> decay_ranges(
    const ParamGroup& group,
    const std::vector<double>& of_parameters) {
  std::map<std::int64_t, DecayRange> by_begin;
  for (std::size_t i = 0; i < of_parameters.size(); ++i) {
    for (const Piece& piece :
         group.weights().main().local_pieces(static_cast<std::int64_t>(i))) {
      if (piece.numel > 0) {
        by_begin[piece.local_offset] = {
            piece.local_offset + piece.numel,
            static_cast<float>(of_parameters[i])};
      }
    }
  }
  std::vector<DecayRange> ranges;
  for (const auto& [begin, range] : by_begin) {
    if (!ranges.empty() && ranges.back().weight_decay == range.weight_decay) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  }
  const std::int64_t numel = group.weights().main().local().numel();
  if (ranges.empty()) {
    ranges.push_back({numel, 0.0F});
  }
  ranges.back().end = numel;
  return ranges;
}

}  // namespace

Optimizer::Optimizer(std::vector<ParamGroup*> groups, double weight_decay) {
  FLATSHARD_CHECK(
      weight_decay >= 0,
      config,
      "expected optimizer.weight_decay >= 0, got {}",
      weight_decay);
  for (ParamGroup* group : groups) {
    if (!group->trainable()) {
      continue;
    }
    groups_.push_back(group);
  }
  updates_.resize(groups_.size());
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    set_weight_decay(i, decays_by_attribute(*groups_[i], weight_decay));
  }
  group_steps_.assign(groups_.size(), 0);
}

void Optimizer::set_weight_decay(
    std::size_t group,
    const std::vector<double>& of_parameters) {
  const ParamGroup& g = *groups_.at(group);
  FLATSHARD_CHECK(
      of_parameters.size() == g.parameters().size(),
      usage,
      "expected a weight decay for each of {} parameters of {}, got {}",
      g.parameters().size(),
      g.name(),
      of_parameters.size());
  for (const double decay : of_parameters) {
    FLATSHARD_CHECK(
        decay >= 0,
        config,
        "expected optimizer.weight_decay >= 0, got {}",
        decay);
  }
  wait();  // the last step may still read the ranges
  FlatUpdate& update = updates_[group];
  update.decay = decay_ranges(g, of_parameters);
  const at::Device device = g.weights().main().local().device();
  if (update.decay.size() > 1 && device.is_cuda()) {
    std::vector<std::int64_t> ends;
    std::vector<float> decays;
    for (const DecayRange& range : update.decay) {
      ends.push_back(range.end);
      decays.push_back(range.weight_decay);
    }
    update.device_ends = at::tensor(ends, at::kLong).to(device);
    update.device_decays = at::tensor(decays, at::kFloat).to(device);
  }
}

void Optimizer::wait() const {
  if (!groups_.empty()) {
    updated_.wait(*current_stream(groups_.front()->mesh()->device()));
  }
}

void Optimizer::step(double lr, const at::Tensor& grad_scale) {
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
  for (ParamGroup* group : groups_) {
    if (group->gradients().reduced().exists()) {
      written.push_back(group);
    }
  }
  WeightWrite write(std::move(written), stream);
  at::Tensor scale_on_host;  // waits for the device once, if at all
  const auto host_scale = [&] {
    if (grad_scale.defined() && !scale_on_host.defined()) {
      scale_on_host = grad_scale.cpu();
    }
    return scale_on_host;
  };
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    ParamGroup& group = *groups_[i];
    if (!group.gradients().reduced().exists()) {
      continue;
    }
    ++group_steps_[i];
    FlatUpdate& flat = updates_[i];  // the last step is done with it
    const bool offload = group.options().offload;
    flat.main = group.weights().main().local();
    flat.compute = offload ? at::Tensor() : group.weights().compute_shard();
    flat.grad = group.gradients().reduced().local();
    flat.grad_scale = offload ? host_scale() : grad_scale;
    const Float8Outputs* float8 =
        writes_float8() ? group.weights().float8_outputs() : nullptr;
    flat.float8 = float8 != nullptr ? *float8 : Float8Outputs();
    const bool encodes =
        float8 != nullptr || !group.weights().encodes_at_gather();
    stream.submit([this, i, lr] {
      if (updates_[i].float8.amax.defined()) {
        updates_[i].float8.amax.zero_();
      }
      update(i, updates_[i], lr);
      updates_[i].grad.reset();  // zero_grad gives its memory back
    });
    write.end(
        group,
        offload || !encodes ? WeightWrite::Cast::here
                            : WeightWrite::Cast::by_writer);
  }
  updated_.record(stream);
}

void Optimizer::zero_grad() {
  for (ParamGroup* group : groups_) {
    group->gradients().zero();
  }
}

at::Tensor Optimizer::new_state(std::size_t group) const {
  const at::Tensor& main = groups_[group]->weights().main().local();
  return at::zeros({main.numel()}, main.options().dtype(at::kFloat));
}

std::vector<std::pair<std::string, std::vector<NamedShard>>>
Optimizer::state_shards(std::size_t group) const {
  std::vector<std::pair<std::string, std::vector<NamedShard>>> shards;
  for (const auto& [name, flat] : state(group)) {
    shards.emplace_back(name, groups_[group]->shards_of(flat));
  }
  return shards;
}

std::int64_t Optimizer::state_nbytes() const {
  std::int64_t nbytes = 0;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (const auto& [name, tensor] : state(i)) {
      nbytes += tensor.nbytes();
    }
  }
  return nbytes;
}

}  // namespace flatshard
