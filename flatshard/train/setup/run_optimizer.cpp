#include "flatshard/train/setup/run_optimizer.h"

#include "flatshard/models/hf_names.h"

namespace flatshard {
namespace {

/// Returns the matrices of a parameter of a block, as Hugging Face stores them.
std::vector<MatrixShape> matrices_of_block(
    const StoredEntriesOf& entries_of,
    const GroupParameter& parameter) {
  const std::vector<std::int64_t> shape = parameter.whole_shape();
  std::vector<MatrixShape> matrices;
  for (const StoredEntry& entry : entries_of(parameter.names.front(), shape)) {
    const std::size_t num_dims = entry.shape.size();
    if (num_dims < 2 || !models::layer_of_hf_entry(entry.name)) {
      return {};
    }
    // A tensor of all experts is one matrix for each.
    const std::int64_t count = num_dims == 3 ? entry.shape.front() : 1;
    matrices.insert(
        matrices.end(),
        count,
        {.rows = entry.shape[num_dims - 2], .columns = entry.shape.back()});
  }
  return matrices;
}

double momentum_of(const config::Optimizer& keys, Algorithm algorithm) {
  return keys.momentum.value_or(
      algorithm == Algorithm::muon ? config::kMuonMomentum : 0);
}

}  // namespace

ParameterRules parameter_rules(
    const config::Optimizer& keys,
    const StoredEntriesOf& entries_of) {
  ParameterRules rules{
      .rest =
          {.algorithm = keys.name,
           .weight_decay = keys.weight_decay,
           .beta1 = keys.beta1,
           .beta2 = keys.beta2,
           .eps = keys.eps,
           .momentum = momentum_of(keys, keys.name),
           .muon =
               {.nesterov = keys.nesterov,
                .newton_schulz =
                    {.coefficients = keys.ns_coefficients,
                     .steps = keys.ns_steps,
                     .eps = keys.muon_eps},
                .adjust_lr = keys.adjust_lr_fn},
           .state_dtype = keys.state_dtype},
      .rules = keys.param_groups,
      .decay = keys.decay,
      .muon = {.matrices_of = [entries_of](const GroupParameter& parameter) {
        return matrices_of_block(entries_of, parameter);
      }}};
  for (ParameterRule& rule : rules.rules) {
    // A rule without an algorithm has the momentum of the rest.
    if (!rule.momentum && rule.algorithm) {
      rule.momentum = momentum_of(keys, *rule.algorithm);
    }
  }
  rules.entry_names = [entries_of](const GroupParameter& parameter) {
    std::vector<std::string> names;
    for (StoredEntry& entry :
         entries_of(parameter.names.front(), parameter.whole_shape())) {
      names.push_back(std::move(entry.name));
    }
    return names;
  };
  return rules;
}

std::unique_ptr<Optimizer> make_optimizer(
    const config::Optimizer& keys,
    const std::vector<ParamGroup*>& groups,
    const StoredEntriesOf& entries_of,
    const StreamOptions& streams) {
  return std::make_unique<Optimizer>(
      groups,
      parameter_rules(keys, entries_of),
      StateOffload{.enabled = keys.offload_states, .streams = streams});
}

LrSchedule lr_schedule(
    const config::LrScheduler& keys,
    double base_lr,
    std::int64_t total_steps) {
  LrSchedule schedule{
      .kind = keys.name,
      .base_lr = base_lr,
      .total_steps = total_steps,
      .warmup_steps = keys.warmup_steps,
      .decay_ratio = keys.decay_ratio,
      .min_lr_factor = keys.min_lr_factor,
      .decay = keys.decay_type};
  schedule.validate();
  return schedule;
}

}  // namespace flatshard
