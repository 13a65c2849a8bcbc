#include "flatshard/train/run/profile_report.h"

#include "flatshard/models/flops.h"

namespace flatshard {

ProfileReport::ProfileReport(
    const Options& options,
    at::Device device,
    SpeedOfLight light,
    RunOutput* output)
    : options_(options),
      light_(std::move(light)),
      recorder_(device),
      output_(output) {
}

bool ProfileReport::is_of(std::int64_t step) const {
  return output_ != nullptr && options_.step == step;
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
  const auto path = options_.folder / fmt::format("step_{}_rank_0.json", step);
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
    const models::ModelConfig& model,
    const StepWork& work,
    std::optional<double> peak_flops) {
  // These ranks divide the matmuls and the heads of a sequence.
  const auto tokens = static_cast<double>(work.sequences * work.seq_len) /
                      static_cast<double>(work.ranks_per_sample);
  const double products =
      6.0 * static_cast<double>(models::num_matmul_parameters(model));
  const double all = models::flops_per_token(
      model,
      work.seq_len,
      models::FlopsConvention::causal);
  return {
      .peak_flops = peak_flops.value_or(0),
      .flops = {
          {"GEMM", tokens * work.matmul_flops_per_token},
          {"attention", tokens * (all - products)}}};
}

}  // namespace flatshard
