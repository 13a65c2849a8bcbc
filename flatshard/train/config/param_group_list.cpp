#include "flatshard/train/config/param_group_list.h"

#include <algorithm>

namespace flatshard::config {
namespace {

// Muon leaves parameters without matrices to AdamW.
const std::vector<Algorithm> kUsesAdamW = {Algorithm::adamw, Algorithm::muon};

const RuleNumber kNumbers[] = {
    {"lr_mult", &ParameterRule::lr_mult},
    {"wd_mult", &ParameterRule::wd_mult},
    {"beta1", &ParameterRule::beta1, {.max = 1}, kUsesAdamW},
    {"beta2", &ParameterRule::beta2, {.max = 1}, kUsesAdamW},
    {"eps", &ParameterRule::eps, {}, kUsesAdamW},
    {"momentum",
     &ParameterRule::momentum,
     {.max = 1},
     {Algorithm::sgd, Algorithm::muon}}};

}  // namespace

std::optional<double> RuleNumber::of(const ParameterRule& rule) const {
  if (const auto* number = std::get_if<double ParameterRule::*>(&member)) {
    const double value = rule.**number;
    return value == ParameterRule().**number ? std::nullopt
                                             : std::optional(value);
  }
  return rule.*std::get<std::optional<double> ParameterRule::*>(member);
}

bool RuleNumber::is_used_by(Algorithm algorithm) const {
  return used_by.empty() || std::ranges::count(used_by, algorithm) > 0;
}

void RuleNumber::set(ParameterRule& rule, double value) const {
  std::visit([&](auto number) { rule.*number = value; }, member);
}

std::span<const RuleNumber> rule_numbers() {
  return kNumbers;
}

}  // namespace flatshard::config
