#include "flatshard/train/config/optimizer_keys.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/train/config/key_rows.h"
#include "flatshard/train/config/param_group_list.h"
#include "flatshard/train/config/split_list.h"

namespace flatshard::config {

static ConfigField field_of(Coefficients& member) {
  return WordField{
      .get = [&member] { return fmt::format("{}", fmt::join(member, ", ")); },
      .set =
          [&member](std::string_view text) {
            const std::vector<std::string> items =
                split_list(std::string(text));
            bool are_numbers = items.size() == member.size();
            for (std::size_t i = 0; are_numbers && i < items.size(); ++i) {
              char* end = nullptr;
              member[i] = std::strtod(items[i].c_str(), &end);
              are_numbers = end == items[i].c_str() + items[i].size() &&
                            std::isfinite(member[i]);
            }
            FLATSHARD_CHECK(
                are_numbers,
                config,
                "optimizer.ns_coefficients: expected three numbers, such as "
                "\"3.4445, -4.775, 2.0315\", got \"{}\"",
                shortened(text));
            return true;
          },
      .words = [] { return std::vector<std::string_view>(); }};
}

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
#define KEY(...) KEY_ROW(optimizer, __VA_ARGS__)
#include "flatshard/train/config/sections/optimizer.def"
#define KEY(...) KEY_ROW(lr_scheduler, __VA_ARGS__)
#include "flatshard/train/config/sections/lr_scheduler.def"
};

void check_optimizer(const Config& config) {
  const Optimizer& optimizer = config.optimizer;
  const std::pair<std::string_view, double> below_one[] = {
      {"beta1", optimizer.beta1},
      {"beta2", optimizer.beta2},
      {"momentum", optimizer.momentum.value_or(0)}};
  for (const auto& [name, value] : below_one) {
    FLATSHARD_CHECK(
        value < 1,
        config,
        "optimizer.{} must be below 1, got {}",
        name,
        value);
  }
  const std::pair<std::string_view, double> above_zero[] = {
      {"eps", optimizer.eps},
      {"muon_eps", optimizer.muon_eps}};
  for (const auto& [name, value] : above_zero) {
    FLATSHARD_CHECK(
        value > 0,
        config,
        "optimizer.{} must be above 0, got {}",
        name,
        value);
  }
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
        !rule.eps || *rule.eps > 0,
        config,
        "optimizer.param_groups: pattern \"{}\": eps must be above 0, got {}",
        rule.pattern,
        *rule.eps);
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

bool Optimizer::has_states() const {
  return state_nbytes() > 0 ||
         std::ranges::any_of(param_groups, [&](const ParameterRule& rule) {
           return rule.algorithm.value_or(name) != Algorithm::sgd ||
                  rule.momentum.value_or(momentum.value_or(0)) > 0;
         });
}

KeyTable optimizer_keys() {
  return {kOptimizerKeys, check_optimizer};
}

}  // namespace flatshard::config
