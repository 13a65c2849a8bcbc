#include "flatshard/train/config/param_group_list.h"

namespace flatshard::config {
namespace {

const RuleNumber kNumbers[] = {
    {"lr_mult", &ParameterRule::lr_mult},
    {"wd_mult", &ParameterRule::wd_mult},
    {"beta1", &ParameterRule::beta1, {.max = 1}, Algorithm::adamw},
    {"beta2", &ParameterRule::beta2, {.max = 1}, Algorithm::adamw},
    {"eps", &ParameterRule::eps, {}, Algorithm::adamw},
    {"momentum", &ParameterRule::momentum, {.max = 1}, Algorithm::sgd}};

}  // namespace

std::optional<double> RuleNumber::of(const ParameterRule& rule) const {
  if (const auto* number = std::get_if<double ParameterRule::*>(&member)) {
    const double value = rule.**number;
    return value == ParameterRule().**number ? std::nullopt
                                             : std::optional(value);
  }
  return rule.*std::get<std::optional<double> ParameterRule::*>(member);
}

void RuleNumber::set(ParameterRule& rule, double value) const {
  std::visit([&](auto number) { rule.*number = value; }, member);
}

std::span<const RuleNumber> rule_numbers() {
  return kNumbers;
}

}  // namespace flatshard::config
