#include "flatshard/train/config/optimizer_keys.h"

#include <algorithm>
#include <optional>

#include "flatshard/core/error.h"
#include "flatshard/train/config/key_rows.h"
#include "flatshard/train/config/param_group_list.h"

namespace flatshard::config {
namespace {

// Muon leaves parameters without matrices to AdamW.
constexpr UsedIf kOfAdamW{
    "optimizer.name",
    WHEN(
        c.optimizer.uses(Algorithm::adamw) ||
        c.optimizer.uses(Algorithm::muon)),
    "adamw and muon"};
constexpr UsedIf kOfMomentum{
    "optimizer.name",
    WHEN(c.optimizer.uses(Algorithm::sgd) || c.optimizer.uses(Algorithm::muon)),
    "sgd and muon"};
constexpr UsedIf kOfMuon{
    "optimizer.name",
    WHEN(c.optimizer.uses(Algorithm::muon)),
    "muon"};
constexpr UsedIf kOfDecays{
    "lr_scheduler.name",
    WHEN(c.lr_scheduler.name != LrSchedule::Kind::constant),
    "linear, cosine and wsd"};
constexpr UsedIf kOfWsd{
    "lr_scheduler.name",
    WHEN(c.lr_scheduler.name == LrSchedule::Kind::wsd),
    "wsd"};

const Conflict kBlocksOfChunks{
    {"parallelism.granularity"},
    WHEN(
        c.optimizer.needs_state_blocks() &&
        c.parallelism.granularity.kind() == Granularity::Kind::chunk),
    "chunks split blocks of 256 elements; use \"element\""};

const ConfigKey kOptimizerKeys[] = {
    KEY(optimizer.name,
        "Optimizer. muon orthogonalizes the updates of the matrices of blocks, "
        "each as Hugging Face stores it: experts, gate, and up separately. "
        "AdamW updates all other parameters with the same keys: embeddings, "
        "the head, and parameters with one dimension.",
        .conflicts =
            {{{"cuda_graph.impl"},
              WHEN(
                  c.optimizer.uses(Algorithm::muon) &&
                  c.cuda_graph.whole_step()),
              "Muon is not supported with a graph of the whole step; use "
              "\"unit\" or \"none\""},
             {{"lora.rank"},
              WHEN(c.optimizer.uses(Algorithm::muon) && c.lora.enabled()),
              "Muon does not support adapters; use \"adamw\""}}),
    KEY(optimizer.lr, "Peak learning rate."),
    KEY(optimizer.beta1,
        "AdamW: decay rate of the first moment.",
        .range = {.max = 1},
        .used_if = {kOfAdamW}),
    KEY(optimizer.beta2,
        "AdamW: decay rate of the second moment.",
        .range = {.max = 1},
        .used_if = {kOfAdamW}),
    KEY(optimizer.eps,
        "AdamW: term added to the denominator.",
        .used_if = {kOfAdamW}),
    KEY(optimizer.weight_decay,
        "Decoupled weight decay, for the weights that are decayed."),
    KEY(optimizer.decay,
        "Parameters that weight decay applies to. matrices excludes parameters "
        "with one dimension, such as norms, and biases."),
    KEY(optimizer.momentum,
        "Momentum of SGD and Muon. Default: 0 with SGD, 0.95 with Muon.",
        .range = {.max = 1},
        .used_if = {kOfMomentum}),
    KEY(optimizer.nesterov,
        "Muon: use Nesterov momentum.",
        .used_if = {kOfMuon}),
    KEY(optimizer.ns_steps,
        "Muon: number of Newton-Schulz iterations.",
        .range = {1, 99},
        .used_if = {kOfMuon}),
    KEY(optimizer.muon_eps,
        "Muon: lower limit of the norm that a matrix is divided by before the "
        "iterations.",
        .used_if = {kOfMuon}),
    KEY(optimizer.adjust_lr_fn,
        "Muon: factor of the learning rate for a matrix of A rows and B "
        "columns. match_rms_adamw: 0.2 sqrt(max(A, B)), so that updates are "
        "as large as AdamW's and optimizer.lr suits both. original: "
        "sqrt(max(1, A / B)).",
        .used_if = {kOfMuon}),
    KEY(optimizer.param_groups,
        "Parameter groups, one table [[optimizer.param_groups]] per group. "
        "pattern is a regular expression that is searched in the Hugging Face "
        "names of parameters. The first table that matches applies. Other "
        "parameters have the values of "
        "[optimizer]. lr_mult and wd_mult are factors of the learning rate and "
        "of the weight decay. name, beta1, beta2, eps, momentum, and "
        "state_dtype "
        "replace the values of [optimizer].",
        .conflicts = {kBlocksOfChunks}),
    KEY(optimizer.state_dtype,
        "AdamW: data type of the two optimizer states. int8 has blocks of 256 "
        "elements with a scale each; embeddings and parameters of fewer than "
        "4096 elements keep float32 states.",
        .used_if = {kOfAdamW},
        .conflicts = {kBlocksOfChunks}),
    KEY(optimizer.stochastic_rounding,
        "AdamW: round bfloat16 main weights up or down at random, so that the "
        "mean is exact. Otherwise, updates of less than half a rounding step "
        "are lost.",
        .used_if = {kOfAdamW},
        .conflicts =
            {{{"precision.main_params"},
              WHEN(
                  c.precision.main_params != at::kBFloat16 &&
                  c.optimizer.stochastic_rounding),
              "it is for bfloat16 main weights; use \"bfloat16\""},
             {{"parallelism.granularity"},
              WHEN(
                  c.parallelism.granularity.kind() ==
                      Granularity::Kind::chunk &&
                  c.optimizer.stochastic_rounding),
              "chunks may start at any element; use \"element\""}}),
    KEY(optimizer.overlap,
        "Update the weights on a separate stream, in parallel with the next "
        "forward. The all-gather of a unit waits only for the update of that "
        "unit."),

    KEY(lr_scheduler.name, "Learning-rate schedule after the warmup."),
    KEY(lr_scheduler.warmup_steps,
        "Number of steps of linear warmup.",
        .range = {.max = kMaxSteps},
        .conflicts =
            {{{"training.steps"},
              WHEN(c.lr_scheduler.warmup_steps > c.training.steps),
              "the warm-up is longer than the run"}}),
    KEY(lr_scheduler.decay_ratio,
        "Fraction of the steps, at the end of the run, over which the learning "
        "rate decays. Default: linear and cosine decay from the end of the "
        "warmup, wsd over the last 0.2.",
        .range = {.max = 1},
        .used_if = {kOfDecays}),
    KEY(lr_scheduler.min_lr_factor,
        "Final learning rate, as a fraction of optimizer.lr.",
        .range = {.max = 1},
        .used_if = {kOfDecays}),
    KEY(lr_scheduler.decay_type,
        "Shape of the decay of wsd.",
        .used_if = {kOfWsd}),
};

void check_optimizer(const Config& config) {
  const Optimizer& optimizer = config.optimizer;
  FLATSHARD_CHECK(
      optimizer.name != OptimizerName::adamw ||
          (optimizer.beta1 < 1 && optimizer.beta2 < 1),
      config,
      "optimizer.beta1 and optimizer.beta2 must be below 1, got {} and {}",
      optimizer.beta1,
      optimizer.beta2);
  for (const ParameterRule& rule : optimizer.param_groups) {
    const Algorithm algorithm = rule.algorithm.value_or(optimizer.name);
    for (const RuleNumber& number : rule_numbers()) {
      const auto value = number.of(rule);
      FLATSHARD_CHECK(
          !value || number.is_used_by(algorithm),
          config,
          "optimizer.param_groups: pattern \"{}\" sets {}, but it has no "
          "effect with name = \"{}\"; remove it",
          rule.pattern,
          number.name,
          word_of(algorithm));
      FLATSHARD_CHECK(
          !value || number.range.max != 1 || *value < 1,
          config,
          "optimizer.param_groups: pattern \"{}\": {} must be below 1, got {}",
          rule.pattern,
          number.name,
          *value);
    }
    FLATSHARD_CHECK(
        !rule.state_dtype || algorithm == Algorithm::adamw,
        config,
        "optimizer.param_groups: pattern \"{}\" sets state_dtype, but it has "
        "no effect with name = \"{}\"; remove it",
        rule.pattern,
        word_of(algorithm));
  }
}

// Returns the bytes of the states per element.
double
state_nbytes_of(Algorithm algorithm, double momentum, StateFormat state_dtype) {
  if (algorithm == Algorithm::muon) {
    return sizeof(float);  // parameters without matrices have more
  }
  if (algorithm != Algorithm::adamw) {
    return momentum > 0 ? sizeof(float) : 0;
  }
  switch (state_dtype) {
    case StateFormat::float32:
      return 2 * sizeof(float);
    case StateFormat::bfloat16:
      return 2 * sizeof(float) / 2.0;
    case StateFormat::int8:
      break;
  }
  return 2 + 2 * sizeof(float) / static_cast<double>(kStateBlock);
}

}  // namespace

bool Optimizer::uses(Algorithm algorithm) const {
  return name == algorithm || std::ranges::count(
                                  param_groups,
                                  std::optional(algorithm),
                                  &ParameterRule::algorithm) > 0;
}

bool Optimizer::uses(StateFormat format) const {
  return state_dtype == format || std::ranges::count(
                                      param_groups,
                                      std::optional(format),
                                      &ParameterRule::state_dtype) > 0;
}

bool Optimizer::needs_state_blocks() const {
  return uses(StateFormat::int8) ||
         (uses(StateFormat::float32) && uses(StateFormat::bfloat16));
}

double Optimizer::state_nbytes() const {
  return state_nbytes_of(name, momentum.value_or(0), state_dtype);
}

double Optimizer::fewest_state_nbytes() const {
  double fewest = state_nbytes();
  for (const ParameterRule& rule : param_groups) {
    fewest = std::min(
        fewest,
        state_nbytes_of(
            rule.algorithm.value_or(name),
            rule.momentum.value_or(momentum.value_or(0)),
            rule.state_dtype.value_or(state_dtype)));
  }
  return fewest;
}

KeyTable optimizer_keys() {
  return {kOptimizerKeys, check_optimizer};
}

}  // namespace flatshard::config
