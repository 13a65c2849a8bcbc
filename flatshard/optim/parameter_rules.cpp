#include "flatshard/optim/parameter_rules.h"

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <regex>
#include <string_view>
#include <tuple>
#include <utility>

namespace flatshard {
namespace {

constexpr std::size_t kNamesInErrors = 3;

// By rule, whether AdamW replaces Muon, and whether it is not decayed.
using GroupKey = std::tuple<std::size_t, bool, bool>;

std::regex regex_of(const std::string& pattern) {
  FLATSHARD_CHECK(
      !pattern.empty(),
      config,
      "optimizer.param_groups: expected a pattern, got an empty one; \".\" "
      "matches every parameter");
  try {
    return std::regex(pattern);
  } catch (const std::regex_error& error) {
    FLATSHARD_THROW(
        config,
        "optimizer.param_groups: pattern \"{}\" is not a regular expression "
        "(ECMAScript): {}",
        pattern,
        error.what());
  }
}

ParameterValues values_of(
    const ParameterRule& rule,
    const ParameterValues& rest) {
  ParameterValues values = rest;
  values.algorithm = rule.algorithm.value_or(rest.algorithm);
  values.lr_mult *= rule.lr_mult;
  values.weight_decay *= rule.wd_mult;
  values.beta1 = rule.beta1.value_or(rest.beta1);
  values.beta2 = rule.beta2.value_or(rest.beta2);
  values.eps = rule.eps.value_or(rest.eps);
  values.momentum = rule.momentum.value_or(rest.momentum);
  values.state_dtype = rule.state_dtype.value_or(rest.state_dtype);
  return values;
}

// Returns whether the pattern is found in the parameter's names. Its entries
// are updated together, so a pattern matches all of them or none.
bool matches(
    const std::regex& regex,
    const std::string& pattern,
    const GroupParameter& parameter,
    const std::vector<std::string>& entries) {
  const auto found = [&](const std::string& name) {
    return std::regex_search(name, regex);
  };
  // A single entry is the parameter under its Hugging Face name.
  const auto first = parameter.names.begin() + (entries.size() == 1 ? 1 : 0);
  if (std::any_of(first, parameter.names.end(), found)) {
    return true;
  }
  const auto matched = std::find_if(entries.begin(), entries.end(), found);
  if (matched == entries.end()) {
    return false;
  }
  const auto other = std::find_if_not(entries.begin(), entries.end(), found);
  FLATSHARD_CHECK(
      other == entries.end(),
      config,
      "optimizer.param_groups: pattern \"{}\" matches {} but not {}. Both are "
      "part of parameter {} and are updated together; match both or neither",
      pattern,
      *matched,
      *other,
      parameter.names.front());
  return true;
}

bool is_decayed(const GroupParameter& p, Decay decay) {
  const auto attribute = p.attributes.find(kWeightDecayAttribute);
  if (attribute != p.attributes.end()) {
    FLATSHARD_CHECK(
        attribute->second == "none",
        config,
        "parameter {}: expected attribute {} to be \"none\" or absent, got "
        "\"{}\"",
        p.names.front(),
        kWeightDecayAttribute,
        attribute->second);
    return false;
  }
  return decay == Decay::all ||
         (p.whole_shape().size() > 1 && !p.names.front().ends_with("bias"));
}

std::string text_of(StateFormat format) {
  switch (format) {
    case StateFormat::float32:
      break;
    case StateFormat::bfloat16:
      return ", bfloat16 states";
    case StateFormat::int8:
      return ", int8 states";
  }
  return "";
}

std::string text_of(const ParameterValues& values) {
  const auto facts = std::find_if(
      std::begin(kAlgorithms),
      std::end(kAlgorithms),
      [&](const AlgorithmFacts& f) { return f.algorithm == values.algorithm; });
  std::string text = fmt::format(
      "{}, lr x {}, weight decay {}",
      facts->name,
      values.lr_mult,
      values.weight_decay);
  if (facts->has_betas) {
    text += fmt::format(
        ", betas {} and {}, eps {}",
        values.beta1,
        values.beta2,
        values.eps);
    text += text_of(values.state_dtype);
  }
  if (facts->has_momentum) {
    text += fmt::format(", momentum {}", values.momentum);
  }
  return text;
}

std::string without_escapes(std::string pattern) {
  std::erase(pattern, '\\');
  std::erase(pattern, '^');
  std::erase(pattern, '$');
  return pattern;
}

// Returns the runs of `num` parts between dots of `name`.
std::vector<std::string> parts_of(const std::string& name, std::size_t num) {
  std::vector<std::size_t> begins = {0};
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '.') {
      begins.push_back(i + 1);
    }
  }
  begins.push_back(name.size() + 1);
  std::vector<std::string> parts;
  for (std::size_t i = 0; i + num < begins.size(); ++i) {
    parts.push_back(name.substr(begins[i], begins[i + num] - 1 - begins[i]));
  }
  return parts.empty() ? std::vector{name} : parts;
}

// Returns names a part of which is near the pattern, one for each part.
std::vector<std::string> names_near(
    const std::string& pattern,
    const std::vector<std::string>& names) {
  const std::string wanted = without_escapes(pattern);
  const auto num =
      static_cast<std::size_t>(std::count(wanted.begin(), wanted.end(), '.'));
  std::map<std::string, std::string> name_of;  // by part, the first
  for (const std::string& name : names) {
    for (const std::string& part : parts_of(name, num + 1)) {
      name_of.emplace(part, name);
    }
  }
  std::vector<std::pair<std::size_t, std::string>> by_distance;
  for (const auto& [part, name] : name_of) {
    by_distance.emplace_back(edit_distance(wanted, part), name);
  }
  std::sort(by_distance.begin(), by_distance.end());
  std::vector<std::string> near;
  for (const auto& [distance, name] : by_distance) {
    if (near.size() < kNamesInErrors &&
        std::find(near.begin(), near.end(), name) == near.end()) {
      near.push_back(name);
    }
  }
  return near;
}

// A rule's parameters that Muon updates, and those that AdamW updates instead.
struct MuonParameters {
  std::int64_t matrices = 0;
  std::int64_t others = 0;
};

// Checks that rules of Muon have an effect.
void check_muon(
    const ParameterRules& rules,
    const std::vector<ParameterValues>& values,
    const std::map<GroupKey, ParameterGroupValues>& found) {
  std::vector<MuonParameters> counts(rules.rules.size());
  for (const auto& [key, group] : found) {
    const auto& [rule, replaced, undecayed] = key;
    if (rule < counts.size()) {
      (replaced ? counts[rule].others : counts[rule].matrices) +=
          group.num_parameters;
    }
  }
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (values[r].algorithm != Algorithm::muon) {
      continue;
    }
    const ParameterRule& rule = rules.rules[r];
    const auto [matrices, others] = counts[r];
    FLATSHARD_CHECK(
        rule.algorithm != Algorithm::muon || matrices > 0,
        config,
        "optimizer.param_groups: pattern \"{}\" sets name = \"muon\", but "
        "matches only parameters that Muon does not update: embeddings, the "
        "head, and parameters with one dimension; use \"adamw\"",
        rule.pattern);
    FLATSHARD_CHECK(
        !rule.momentum || matrices > 0,
        config,
        "optimizer.param_groups: pattern \"{}\" sets momentum, but matches "
        "only parameters that AdamW updates, since they are not matrices of "
        "blocks; set beta1 and beta2, or remove momentum",
        rule.pattern);
    FLATSHARD_CHECK(
        (!rule.beta1 && !rule.beta2 && !rule.eps) || others > 0,
        config,
        "optimizer.param_groups: pattern \"{}\" sets beta1, beta2 or eps, but "
        "matches only matrices that Muon updates; set momentum, or remove them",
        rule.pattern);
  }
}

}  // namespace

void ParameterValues::validate() const {
  FLATSHARD_CHECK(
      lr_mult >= 0,
      config,
      "expected a learning rate >= 0 in every parameter group, got lr_mult {}",
      lr_mult);
  FLATSHARD_CHECK(
      weight_decay >= 0,
      config,
      "expected optimizer.weight_decay >= 0, got {}",
      weight_decay);
  FLATSHARD_CHECK(
      beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
      config,
      "expected optimizer.beta1 and optimizer.beta2 in [0, 1), got {} and {}",
      beta1,
      beta2);
  FLATSHARD_CHECK(eps > 0, config, "expected optimizer.eps > 0, got {}", eps);
  FLATSHARD_CHECK(
      momentum >= 0 && momentum < 1,
      config,
      "expected optimizer.momentum in [0, 1), got {}",
      momentum);
  if (algorithm == Algorithm::muon) {
    muon.newton_schulz.validate();
  }
}

std::string ParameterGroups::table() const {
  std::size_t width = std::string_view("group").size();
  for (const ParameterGroupValues& group : groups) {
    width = std::max(width, group.title.size());
  }
  std::string lines = fmt::format(
      "{:<{}}  {:>10}  {:>15}  values",
      "group",
      width,
      "parameters",
      "elements");
  for (const ParameterGroupValues& group : groups) {
    lines += fmt::format(
        "\n{:<{}}  {:>10}  {:>15}  {}",
        group.title,
        width,
        group.num_parameters,
        group.numel,
        text_of(group.values));
  }
  return lines;
}

TrainedGroup trained_group(const ParamGroup& group) {
  return {
      .name = group.name(),
      .parameters = group.parameters(),
      .plan = &group.plan()};
}

ParameterGroups parameter_groups(
    const std::vector<TrainedGroup>& groups,
    const ParameterRules& rules) {
  rules.rest.validate();
  std::vector<std::regex> regexes;
  std::vector<ParameterValues> values;  // by rule, then of the rest
  for (const ParameterRule& rule : rules.rules) {
    regexes.push_back(regex_of(rule.pattern));
    values.push_back(values_of(rule, rules.rest));
    values.back().validate();
  }
  values.push_back(rules.rest);
  const std::size_t rest = rules.rules.size();
  std::vector<bool> matched(rest + 1);
  std::vector<bool> applied(rest + 1);
  std::vector<std::string> all_names;
  std::map<GroupKey, ParameterGroupValues> found;
  std::vector<std::vector<GroupKey>> of_parameters;
  for (const TrainedGroup& group : groups) {
    auto& keys = of_parameters.emplace_back();
    for (const GroupParameter& p : group.parameters) {
      std::vector<std::string> entries;
      if (rules.entry_names != nullptr && rest > 0) {
        entries = rules.entry_names(p);
      }
      all_names.insert(all_names.end(), p.names.begin(), p.names.end());
      all_names.insert(all_names.end(), entries.begin(), entries.end());
      std::size_t rule = rest;
      for (std::size_t r = 0; r < rest; ++r) {
        if (matches(regexes[r], rules.rules[r].pattern, p, entries)) {
          matched[r] = true;
          rule = std::min(rule, r);
        }
      }
      applied[rule] = true;
      const bool undecayed = !is_decayed(p, rules.decay);
      const bool replaced = values[rule].algorithm == Algorithm::muon &&
                            rules.muon.matrices_of(p).empty();
      const auto& key = keys.emplace_back(rule, replaced, undecayed);
      ParameterGroupValues& its = found[key];
      ++its.num_parameters;
      its.numel += c10::multiply_integers(p.whole_shape());
    }
  }
  for (std::size_t r = 0; r < rest; ++r) {
    const std::string& pattern = rules.rules[r].pattern;
    FLATSHARD_CHECK(
        matched[r],
        config,
        "optimizer.param_groups: pattern \"{}\" matches no parameter that is "
        "trained. Names near it: {}",
        pattern,
        fmt::join(names_near(pattern, all_names), ", "));
    FLATSHARD_CHECK(
        applied[r],
        config,
        "optimizer.param_groups: pattern \"{}\" matches only parameters of "
        "groups before it, and the first match applies; put it before them or "
        "remove it",
        pattern);
  }
  check_muon(rules, values, found);
  ParameterGroups result;
  result.muon = rules.muon;
  std::map<GroupKey, std::size_t> index;
  for (auto& [key, group] : found) {
    const auto& [rule, replaced, undecayed] = key;
    group.title = rule == rest ? "the rest" : rules.rules[rule].pattern;
    group.values = values[rule];
    if (replaced) {
      group.title += ", no matrices";
      group.values.algorithm = Algorithm::adamw;
    }
    if (undecayed) {
      group.title += ", no decay";
      group.values.weight_decay = 0;
    }
    index[key] = result.groups.size();
    result.groups.push_back(group);
  }
  for (const auto& keys : of_parameters) {
    auto& of_group = result.of_parameters.emplace_back();
    for (const auto& key : keys) {
      of_group.push_back(index.at(key));
    }
  }
  return result;
}

ParameterGroups parameter_groups(
    const std::vector<ParamGroup*>& groups,
    const ParameterRules& rules) {
  std::vector<TrainedGroup> trained;
  trained.reserve(groups.size());
  for (const ParamGroup* group : groups) {
    trained.push_back(trained_group(*group));
  }
  return parameter_groups(trained, rules);
}

}  // namespace flatshard
