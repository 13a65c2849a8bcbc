#pragma once

#include "flatshard/models/config.h"
#include "flatshard/plan/estimate.h"
#include "flatshard/train/config/run_config.h"
#include "flatshard/train/plan/planned_run.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flatshard {

/// The machines that a run is planned for.
struct PlannedMachines {
  std::int64_t ranks = 1;
  std::int64_t ranks_per_host = 8;
  plan::Gpu gpu;

  PlannedHost host() const {
    // A table of GPUs without such copies has the rates of collectives twice.
    return {
        .ranks = ranks_per_host,
        .nvlink = gpu.nvlink.copies != gpu.nvlink.all_gather};
  }
};

/// A run that was planned.
struct RunPlan {
  Config config;  ///< resolved
  models::ModelConfig model;
  plan::Job job;
  plan::Estimate estimate;
};

/// Returns the config of a preset for `flatshard plan PRESET`: random tokens,
/// bfloat16 compute and reductions, and sequences of 8192 tokens or the model's
/// maximum length.
/// @throws Error{config} for a name that is not a preset.
Config config_of_preset(
    const std::string& preset,
    const std::vector<std::string>& overrides = {});

/// Returns the same for the model of a Hugging Face config.json. Its weights
/// are not read.
Config config_of_hf_config(
    const std::string& path,
    const std::vector<std::string>& overrides = {});

/// @throws Error{config} as the trainer, for these ranks.
RunPlan plan_run(const Config& config, const PlannedMachines& machines);

/// Returns the seconds of a step on this machine's GPUs, for the trainer's
/// status line. Unset for a device that no table is for, and where the plan
/// cannot be made.
/// @param config  resolved.
std::optional<double> planned_step_seconds(
    const Config& config,
    const models::ModelConfig& model,
    std::int64_t ranks,
    at::Device device);

/// Returns the text of a picture of the step below its title, on one line.
std::string picture_text(const RunPlan& plan);

/// Returns a text for people.
/// @param tokens  how many the run trains on; unset: unknown.
std::string to_string(
    const RunPlan& plan,
    const PlannedMachines& machines,
    const std::optional<double>& tokens);

/// Returns one object for programs.
std::string to_json(
    const RunPlan& plan,
    const PlannedMachines& machines,
    const std::optional<double>& tokens);

}  // namespace flatshard
