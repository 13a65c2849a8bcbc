#include "flatshard/train/setup/float8_choice.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "flatshard/float8/float8_matmul.h"
#include "flatshard/models/moe.h"

namespace flatshard {
Float8Choice::Float8Choice(
    const config::Float8& keys,
    const models::ModelConfig& model) {
  if (!keys.recipe) {
    return;
  }
  format_ = Float8Format{
      .recipe = *keys.recipe,
      .stored_columns = keys.column_plane == config::ColumnPlane::stored,
      .gather_parts = keys.gather_parts,
      .emulate = keys.emulate};
  std::istringstream text(keys.exclude);
  for (std::string pattern; std::getline(text, pattern, ',');) {
    std::erase_if(pattern, [](char c) { return c == ' '; });
    if (!pattern.empty()) {
      excluded_.push_back(pattern);
    }
  }
  if (keys.keep_first_last) {
    excluded_.emplace_back("*layers.0.*");
    excluded_.push_back(fmt::format("*layers.{}.*", model.layers - 1));
  }
}

const std::string* Float8Choice::excluding_pattern(
    const std::string& name) const {
  for (const std::string& pattern : excluded_) {
    if (::fnmatch(pattern.c_str(), name.c_str(), 0) == 0) {
      return &pattern;
    }
  }
  return nullptr;
}

std::string Float8Choice::why_not(
    const std::string& name,
    const std::vector<std::int64_t>& shape) const {
  const std::string* pattern = excluding_pattern(name);
  return pattern != nullptr ? fmt::format("excluded by '{}'", *pattern)
                            : format_->why_not(shape);
}

void Float8Choice::apply_to(FullyShardOptions& options) const {
  if (!enabled()) {
    return;
  }
  options.float8_of = [choice = *this](
                          const std::string& name,
                          const std::vector<std::int64_t>& shape) {
    return choice.why_not(name, shape).empty() ? choice.format_ : std::nullopt;
  };
}

Float8Effect Float8Choice::effect_on(const Runtime& runtime) const {
  std::map<std::string, std::int64_t> reasons;
  bool emulated = false;
  std::int64_t num_fp8 = 0;
  std::int64_t fp8_numel = 0;
  std::int64_t all_numel = 0;
  for (const ParamGroup* group : runtime.all_groups()) {
    for (const GroupParameter& p : group->parameters()) {
      const std::int64_t numel = c10::multiply_integers(p.shape);
      all_numel += numel;
      if (group->options().float8) {
        ++num_fp8;
        emulated |=
            !float8::multiplies(format_->recipe, group->mesh()->device());
        fp8_numel += numel;
        continue;
      }
      const std::string& name = p.names.front();
      const std::string why = why_not(name, p.shape);
      ++reasons
          [models::is_expert_parameter(name) ? "experts"
           : why.empty()                     ? "not read by nn::Linear"
                                             : why];
    }
  }
  std::vector<std::string> others;
  for (const auto& [why, count] : reasons) {
    others.push_back(fmt::format("{} ({})", count, why));
  }
  if (num_fp8 == 0) {
    return {
        .text = fmt::format(
            "float8.recipe = \"{}\" applies to no weight, so the run trains "
            "without FP8. In bfloat16: {}. Change float8.exclude, "
            "float8.keep_first_last or float8.recipe; \"none\" disables FP8",
            float8::to_string(format_->recipe),
            fmt::join(others, ", ")),
        .is_none = true};
  }
  std::string text = fmt::format(
      "float8: {} parameters with {:.1f} % of the elements, {}{}, {} columns",
      num_fp8,
      100.0 * static_cast<double>(fp8_numel) /
          static_cast<double>(std::max<std::int64_t>(1, all_numel)),
      float8::to_string(format_->recipe),
      emulated ? " (emulated)" : "",
      format_->stored_columns ? "stored" : "derived");
  if (!others.empty()) {
    text += fmt::format("; bfloat16: {}", fmt::join(others, ", "));
  }
  return {.text = std::move(text)};
}

}  // namespace flatshard
