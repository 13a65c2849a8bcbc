#include "flatshard/train/data/run_data.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"

namespace flatshard {
namespace {

constexpr const char* kTrain = "train";
constexpr const char* kValidation = "validation";

/// Returns the first of `now` that has another content than the one in its
/// place before.
template <class Sources>
std::optional<std::size_t> first_other(
    const Sources& before,
    const Sources& now) {
  for (std::size_t i = 0; i < std::min(before.size(), now.size()); ++i) {
    if (!now[i].identity.agrees_with(before[i].identity)) {
      return i;
    }
  }
  return std::nullopt;
}

}  // namespace

RunData::RunData(
    const std::vector<data::SourceChoice>& train,
    const data::Loader& loader,
    const std::vector<ValidationSet>& validation_sets) {
  for (std::size_t i = 0; i < loader.sources().size(); ++i) {
    train_.push_back(
        {train.at(i).path, loader.sources()[i].source->identity()});
  }
  for (const ValidationSet& set : validation_sets) {
    validation_.push_back(
        {set.path, set.loader.sources().front().source->identity()});
    validation_option_ = set.option;
  }
}

std::string RunData::to_json() const {
  nlohmann::json all;
  const auto add = [&](const char* key, const Sources& sources) {
    all[key] = nlohmann::json::array();
    for (const Source& source : sources) {
      all[key].push_back(
          {{"path", source.path},
           {"sample", source.identity.sample},
           {"all", source.identity.all}});
    }
  };
  add(kTrain, train_);
  add(kValidation, validation_);
  return all.dump();
}

RunData::Sources RunData::parse(
    const std::string& saved,
    const char* key,
    const std::string& origin) {
  Sources sources;
  try {
    const auto all = nlohmann::json::parse(saved);
    for (const auto& source : all.at(key)) {
      sources.push_back(
          {source.at("path").get<std::string>(),
           {.sample = source.at("sample").get<std::string>(),
            .all = source.at("all").get<std::string>()}});
    }
  } catch (const nlohmann::json::exception& error) {
    FLATSHARD_THROW(
        format,
        "{}: expected lists of datasets in the state 'data', got {}: {}",
        origin,
        saved,
        error.what());
  }
  return sources;
}

void RunData::check(
    const std::string& saved,
    bool continues_training_data,
    const std::string& origin) const {
  const Sources train = parse(saved, kTrain, origin);
  const auto other = first_other(train, train_);
  FLATSHARD_CHECK(
      !continues_training_data || !other,
      config,
      "data.train: {} was trained on another dataset (then {}) than the "
      "content of {}; use the former dataset, or start the new one at its "
      "first sample with checkpoint.exclude = \"loader\"",
      origin,
      train[other.value_or(0)].path,
      train_[other.value_or(0)].path);
  const Sources validation = parse(saved, kValidation, origin);
  if (validation.empty() || validation_.empty()) {
    return;
  }
  const bool same_number = validation.size() == validation_.size();
  const std::size_t at = first_other(validation, validation_).value_or(0);
  if (!same_number || first_other(validation, validation_)) {
    log_warning(
        "{}: the validation data differ from {} ({} of {} datasets, then {} of "
        "{}); validation losses before and after it cannot be compared",
        validation_option_,
        origin,
        validation_[at].path,
        validation_.size(),
        validation[at].path,
        validation.size());
  }
}

}  // namespace flatshard
