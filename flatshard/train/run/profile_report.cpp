#include "flatshard/train/run/profile_report.h"

#include "flatshard/models/flops.h"
#include "flatshard/train/setup/run_device.h"
#include "flatshard/train/setup/run_lora.h"

namespace flatshard {

ProfileReport::ProfileReport(
    const Config& config,
    at::Device device,
    SpeedOfLight light,
    RunOutput* output)
    : enabled_(config.profiling.enabled && output != nullptr),
      step_(config.profiling.step),
      folder_(
          std::filesystem::path(config.run.output_dir) /
          config.profiling.folder),
      light_(std::move(light)),
      recorder_(device),
      output_(output) {
}

bool ProfileReport::is_of(std::int64_t step) const {
  return enabled_ && step == step_;
}

void ProfileReport::begin(std::int64_t step) {
  if (is_of(step)) {
    recorder_.start();
  }
}

void ProfileReport::discard(std::int64_t step) {
  if (is_of(step)) {
    recorder_.discard();
  }
}

void ProfileReport::end(std::int64_t step) {
  if (!is_of(step)) {
    return;
  }
  const auto path = folder_ / fmt::format("step_{}_rank_0.json", step);
  const StepProfile profile = recorder_.stop(path);
  output_->print(fmt::format("trace of step {}: {}", step, path.string()));
  if (profile.classes.empty()) {  // without a GPU
    output_->print(to_string(recorder_.host_operators()));
    output_->profile(step, recorder_.host_operators());
  } else {
    output_->print(to_string(profile, light_));
    output_->profile(step, profile);
  }
}

SpeedOfLight speed_of_light(
    const Config& config,
    const models::ModelConfig& model,
    at::Device device,
    std::int64_t sequences) {
  const std::int64_t seq_len = config.training.seq_len;
  // Ranks that share layers divide the products and the heads of a sequence.
  const auto tokens =
      static_cast<double>(sequences * seq_len) /
      static_cast<double>(config.parallelism.tensor_parallel_degree);
  const double products =
      6.0 * static_cast<double>(models::num_matmul_parameters(model));
  const double all =
      models::flops_per_token(model, seq_len, models::FlopsConvention::causal);
  return {
      .peak_flops = peak_flops(config, device).value_or(0),
      .flops = {
          {"GEMM", tokens * matmul_flops_per_token(config, model)},
          {"attention", tokens * (all - products)}}};
}

}  // namespace flatshard
