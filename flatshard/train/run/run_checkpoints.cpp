#include "flatshard/train/run/run_checkpoints.h"

#include "flatshard/checkpoint/load.h"
#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/flight/recorder.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/format/manifest.h"
#include "flatshard/train/config/optimizer_keys.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/config/split_list.h"
#include "flatshard/train/setup/base_digest.h"
#include "flatshard/train/setup/model_config.h"
#include "flatshard/train/tools/run_files.h"
#include "flatshard/train/tools/stored_model.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace flatshard {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFolderOption = "checkpoint.folder";
constexpr std::string_view kLoaderState = "loader";
constexpr std::string_view kScheduleState = "lr_scheduler";
constexpr std::string_view kRandomState = "random";
constexpr std::string_view kDataState = "data";
// Words of checkpoint.exclude that are not parameters.
constexpr std::string_view kOptimizerWord = "optimizer";
constexpr std::string_view kLoaderWord = "loader";

/// Removes `word`; true when it was there.
bool take(std::vector<std::string>& items, std::string_view word) {
  return std::erase(items, std::string(word)) > 0;
}

std::string to_json(const data::LoaderState& state) {
  nlohmann::json json{
      {"seed", state.seed},
      {"seq_len", state.seq_len},
      {"num_sequences", state.num_sequences},
      {"samples_consumed", state.samples_consumed}};
  for (const auto& part : state.parts) {
    json["parts"].push_back({part.num_sequences, part.share});
  }
  if (state.documents_per_sample > 0) {
    json["documents_per_sample"] = state.documents_per_sample;
  }
  return json.dump();
}

data::LoaderState loader_state(const std::string& text) {
  const auto parsed = nlohmann::json::parse(text, nullptr, false);
  const auto number = [&](const char* key) {
    FLATSHARD_CHECK(
        parsed.is_object() && parsed.contains(key) &&
            parsed[key].is_number_integer(),
        format,
        "the checkpoint's loader state: expected a number '{}', got {}",
        key,
        text);
    return parsed[key].get<std::int64_t>();
  };
  data::LoaderState state{
      .seed = static_cast<std::uint64_t>(number("seed")),
      .seq_len = number("seq_len"),
      .num_sequences = number("num_sequences"),
      .samples_consumed = number("samples_consumed")};
  if (parsed.contains("documents_per_sample")) {
    state.documents_per_sample = number("documents_per_sample");
  }
  for (const auto& part : parsed.value("parts", nlohmann::json::array())) {
    FLATSHARD_CHECK(
        part.is_array() && part.size() == 2 && part[0].is_number_integer() &&
            part[1].is_number_integer(),
        format,
        "the checkpoint's loader state: expected pairs of numbers in 'parts', "
        "got {}",
        text);
    state.parts.push_back({part[0], part[1]});
  }
  return state;
}

/// Returns an explanation for a missing router if the checkpoint has another
/// number of experts. Unset if the numbers are equal, or the number is
/// unknown.
std::optional<std::string> other_experts(
    const fs::path& folder,
    std::int64_t now) {
  try {
    const auto before =
        model_config(checkpoint_config(folder, read_manifest(folder)))
            .moe.num_experts;
    return before == now ? std::nullopt
                         : std::optional(fmt::format(
                               "model.num_experts = {}, the checkpoint has {}",
                               now,
                               before));
  } catch (const Error&) {
    return std::nullopt;  // load_checkpoint has reported the error
  }
}

/// The adapters of a checkpoint fit no other base model.
void check_base(
    const WeightDigests& saved,
    const WeightDigests& now,
    const std::string& origin) {
  for (const auto& [name, digest] : now) {
    const auto found = saved.find(name);
    FLATSHARD_CHECK(
        found != saved.end() && found->second == digest,
        config,
        "model.init_from: expected the base model that {} was trained on, got "
        "one with another {}; set the directory that the run started from",
        origin,
        name);
  }
}

std::string schedule_state(const LrSchedule& schedule) {
  nlohmann::json state{
      // The last step has the lowest rate. It was one after the last before.
      {"definition", 2},
      {"name", config::word_of(schedule.kind)},
      {"lr", schedule.base_lr},
      {"steps", schedule.total_steps},
      {"warmup_steps", schedule.warmup_steps},
      {"decay_ratio", schedule.decay_ratio.value_or(-1)},
      {"min_lr_factor", schedule.min_lr_factor}};
  if (schedule.decay != LrSchedule::Decay::linear) {
    state["decay_type"] = config::word_of(schedule.decay);
  }
  return state.dump();
}

/// Returns the options by which a schedule differs from a saved one, without
/// those that have no effect in either.
std::vector<std::string> schedule_changes(
    const std::string& saved,
    const LrSchedule& schedule) {
  static constexpr std::pair<const char*, const char*> kConstant[] = {
      {"name", "lr_scheduler.name"},
      {"lr", "optimizer.lr"},
      {"warmup_steps", "lr_scheduler.warmup_steps"}};
  static constexpr std::pair<const char*, const char*> kDecay[] = {
      {"steps", "training.steps"},
      {"decay_ratio", "lr_scheduler.decay_ratio"},
      {"decay_type", "lr_scheduler.decay_type"},
      {"min_lr_factor", "lr_scheduler.min_lr_factor"},
      {"definition", "version of the formulas"}};
  const auto before = nlohmann::json::parse(saved, nullptr, false);
  const auto now = nlohmann::json::parse(schedule_state(schedule));
  const auto text = [](const nlohmann::json& state, const char* key) {
    const auto found = state.find(key);
    return found == state.end() || *found == -1 ? "unset" : found->dump();
  };
  std::vector<std::string> changes;
  const auto compare = [&](const auto& options) {
    for (const auto& [key, option] : options) {
      const std::string was = text(before, key);
      const std::string is = text(now, key);
      if (was != is) {
        changes.push_back(fmt::format("{} = {} (was {})", option, is, was));
      }
    }
  };
  compare(kConstant);
  const std::string constant = "\"constant\"";
  if (text(before, "name") != constant || text(now, "name") != constant) {
    compare(kDecay);
  }
  return changes;
}

}  // namespace

RunCheckpoints::RunCheckpoints(Options options, Parts parts)
    : options_(std::move(options)), parts_(std::move(parts)) {
  if (options_.keys.interval > 0) {
    for_option(kFolderOption, [&] {
      checkpointer_ = std::make_unique<Checkpointer>(
          parts_.mesh,
          parts_.groups,
          parts_.optimizer,
          CheckpointOptions{
              .folder = options_.folder,
              .keep_latest = options_.keys.keep_latest_k,
              .whole_tensors = parts_.buffers});
    });
  }
}

std::map<std::string, std::string> RunCheckpoints::state() const {
  std::map<std::string, std::string> state{
      {std::string(kLoaderState), to_json(parts_.loader->state())},
      {std::string(kConfigState), options_.config},
      {std::string(kScheduleState), schedule_state(options_.schedule)},
      // Everything random in a run is a function of the seed and the step.
      {std::string(kRandomState),
       nlohmann::json{{"seed", options_.seed}}.dump()}};
  if (parts_.data != nullptr) {
    state[std::string(kDataState)] = parts_.data->to_json();
  }
  if (!base_.empty()) {
    state[std::string(kBaseState)] = base_;
  }
  return state;
}

void RunCheckpoints::load(std::int64_t step) {
  before_update();
  LoadOptions options{
      .exclude = split_list(options_.keys.exclude),
      .whole_tensors = parts_.buffers};
  const bool without_optimizer = take(options.exclude, kOptimizerWord);
  const bool without_loader = take(options.exclude, kLoaderWord);
  const fs::path path = step_folder(options_.folder, step);
  const auto begin = std::chrono::steady_clock::now();
  const LoadedCheckpoint loaded = [&] {
    try {
      return load_checkpoint(
          path,
          parts_.groups,
          without_optimizer ? nullptr : parts_.optimizer,
          options);
    } catch (const Error& error) {
      if (const auto experts = other_experts(path, options_.num_experts)) {
        throw error.with_context(*experts);
      }
      throw;
    }
  }();
  const auto text = [&](std::string_view key) {
    const auto found = loaded.state.find(std::string(key));
    FLATSHARD_CHECK(
        found != loaded.state.end(),
        format,
        "{}: the state '{}' of a training run is missing",
        path.string(),
        key);
    return found->second;
  };
  const auto saved_data = loaded.state.find(std::string(kDataState));
  if (parts_.data != nullptr && saved_data != loaded.state.end()) {
    parts_.data->check(saved_data->second, !without_loader, path.string());
  }
  if (!base_.empty()) {
    check_base(
        parse_digests(text(kBaseState), path.string()),
        parse_digests(base_, "the run"),
        path.string());
  }
  if (!without_loader) {
    parts_.loader->restore(loader_state(text(kLoaderState)));
  }
  last_saved_ = step;
  last_begun_ = step;
  if (parts_.mesh->rank() != 0) {
    return;
  }
  const auto changes =
      schedule_changes(text(kScheduleState), options_.schedule);
  if (!changes.empty()) {
    log_warning(
        "the learning-rate schedule differs from the one in {}: {}",
        path.string(),
        fmt::join(changes, ", "));
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  log_info(
      "loaded {} in {:.1f} s ({:.2f} GB/s on this rank), {:.1f} s of it "
      "reading and checking",
      path.string(),
      seconds,
      static_cast<double>(loaded.read_nbytes) * 1e-9 / seconds,
      loaded.read_seconds);
}

bool RunCheckpoints::due(std::int64_t step) const {
  return enabled() &&
         (step % options_.keys.interval == 0 || step == options_.last_step);
}

void RunCheckpoints::save(std::int64_t step) {
  if (last_begun_ == step) {
    return;  // loaded from, or asked for at the same step
  }
  checkpointer_->save(step, state());
  last_begun_ = step;
  if (!options_.keys.async) {
    checkpointer_->wait();
  }
  report();
}

void RunCheckpoints::before_update() {
  if (enabled()) {
    checkpointer_->wait_for_copies();
  }
}

void RunCheckpoints::report() {
  if (!enabled()) {
    return;
  }
  for (SaveResult& result : checkpointer_->take_results()) {
    last_error_ = result.error;
    if (!result.error) {
      last_saved_ = result.step;
    }
    if (parts_.output == nullptr) {
      continue;
    }
    if (result.error) {
      parts_.output->checkpoint_error(result.step, result.error->what());
      log_warning(
          "the checkpoint of step {} failed, the run continues and tries again "
          "at the next one: {}",
          result.step,
          result.error->what());
    } else {
      parts_.output->checkpoint(result.step, result.seconds);
      log_info(
          "saved {} in {:.1f} s",
          step_folder(options_.folder, result.step).string(),
          result.seconds);
    }
  }
}

void RunCheckpoints::finish() {
  if (!enabled()) {
    return;
  }
  checkpointer_->wait();
  report();
  if (last_error_) {
    throw last_error_->with_context(kFolderOption);
  }
}

std::int64_t RunCheckpoints::staging_nbytes() const {
  return enabled() ? checkpointer_->staging_nbytes() : 0;
}

}  // namespace flatshard
