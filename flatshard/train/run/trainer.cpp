#include "flatshard/train/run/trainer.h"

#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/device/memory.h"
#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/train/config/option_errors.h"
#include "flatshard/train/plan/run_plan.h"
#include "flatshard/train/tools/export_hf.h"
#include "flatshard/train/tools/run_files.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cmath>
#include <utility>

namespace flatshard {
namespace {

/// Returns the mean of a [] tensor of each rank that reads its own tokens.
/// Collective; blocks.
double mean_over_token_ranks(const at::Tensor& value, const Mesh& ranks) {
  const std::shared_ptr<Mesh> mesh = ranks.token_mesh();
  const at::Tensor mean = value.to(at::kFloat).reshape({1}).clone();
  if (mesh->size() > 1) {
    const CollectiveScope scope("loss");
    mesh->world(Purpose::reduce).all_reduce(mean, ReduceOp::avg);
  }
  const double host = mean.item<double>();
  mesh->check();  // an aborted collective ends without a result
  return host;
}

void measure_waits(TrainState& state, bool measures) {
  state.runtime->exposed_waits().measure(measures);
  if (state.context) {
    state.context->measure(measures);
  }
}

/// Returns the measured waits for weights, gradients and heads. Blocks.
double wait_and_take_exposed_ms(TrainState& state) {
  return state.runtime->exposed_waits().wait_and_take_ms() +
         (state.context ? state.context->wait_and_take_exposed_ms() : 0);
}

}  // namespace

void Trainer::watched(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    mesh_->publish_failure(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    mesh_->publish_failure(error.what());
    throw;
  }
}

std::optional<Trainer::Stop> Trainer::run() {
  std::optional<Stop> stop;
  if (!start_.nothing_left) {
    watched([&] {
      stop = train();
      finish(stop);
    });
  }
  return stop;
}

std::optional<Trainer::Stop> Trainer::train() {
  const std::int64_t steps = config_.training.steps;
  if (output_) {
    output_->begin_progress(
        start_.first_step() - 1,
        steps,
        output_->shows_progress() ? planned_step_seconds(
                                        config_,
                                        model_config_,
                                        mesh_->size(),
                                        device_)
                                  : std::nullopt);
  }
  meter_->restart();
  for (std::int64_t step = start_.first_step(); step <= steps; ++step) {
    const bool last = step == steps;
    const bool logged = last || step == start_.first_step() ||
                        step % config_.metrics.log_freq == 0;
    profile_->begin(step);
    const std::optional<TrainedStep> trained = train_step(step, logged);
    if (!trained) {
      profile_->discard(step);
      step = guard_->give_up(step);
      meter_->restart();
      continue;
    }
    profile_->end(step);
    if (logged) {
      log_step(step, *trained);
    }
    const Requests asked =
        logged || requests_->due(step) ? take_requests(step) : Requests();
    const bool stops = asked.stop_signal != 0;
    save_if(asked.save || stops, step);
    if (!stops || last) {  // a stop must not wait for an engine
      send_weights_if_due(step);
    }
    show_progress(step, trained->loss);
    if (stops && !last) {
      return Stop{
          .signal = asked.stop_signal,
          .step = step,
          .saved = checkpoints_->enabled()};
    }
    if (evaluation_ && evaluation_->due(step)) {
      if (state_.lora) {
        state_.lora->begin_evaluation();
      }
      const ValidationMetrics validation = evaluation_->run(step);
      if (output_) {
        output_->validation(validation);
      }
      meter_->restart();
    }
  }
  return std::nullopt;
}

std::optional<Trainer::TrainedStep> Trainer::train_step(
    std::int64_t step,
    bool logged) {
  Runtime& runtime = *state_.runtime;
  Optimizer& optimizer = *state_.optimizer;
  measure_waits(state_, logged);
  runtime.set_step(step);
  meter_->begin_step();
  experts_->begin_step(logged);
  meter_->data([&] { batches_->load_next(); });
  const at::Tensor loss = microbatches_->forward_backward();
  optimizer.prefetch_states();  // the guard may block the host
  diagnostics_->spoil_gradient(step);
  const GradNorm clip =
      grad_norm_and_scale(runtime.groups(), config_.training.max_norm);
  open_output();
  diagnostics_->check_gradients(step);
  const bool accepted = meter_->device_wait(
      [&] { return guard_->accepts(step, clip.norm, logged); });
  if (!accepted) {
    experts_->discard_step();
    return std::nullopt;
  }
  const double lr = schedule_.lr(step - 1);
  const bool trains = batches_->has_targets();
  if (trains) {
    checkpoints_->before_update();
    experts_->end_step(logged);
    optimizer.step(lr, clip.scale);
  } else {
    // The gradient is zero. An update would only decay weights and moments.
    experts_->discard_step();
  }
  optimizer.zero_grad();
  diagnostics_->check_weights(optimizer);
  runtime.finish_step();
  if (step < config_.training.steps) {
    runtime.gathers().prefetch_forward();
  }
  meter_->end_step();
  return TrainedStep{
      .loss = trains ? loss : at::Tensor(),
      .norm = clip.norm,
      .lr = lr};
}

void Trainer::open_output() {
  if (std::exchange(opened_output_, true)) {
    return;
  }
  state_.runtime->synchronize();
  mesh_->world().barrier();
  mesh_->check();
  if (output_) {
    output_->open(options_.output, start_.goes_on, start_metrics());
  }
  mesh_->world().barrier();  // earlier files were moved away
  mesh_->check();
}

void Trainer::log_step(std::int64_t step, const TrainedStep& trained) {
  measure_waits(state_, false);
  const std::optional<double> loss =
      trained.loss.defined()
          ? std::optional(mean_over_token_ranks(trained.loss, *mesh_))
          : std::nullopt;
  StepMetrics metrics{
      .step = step,
      .steps = config_.training.steps,
      .loss = loss,
      .grad_norm = trained.norm.item<double>(),
      .lr = trained.lr,
      .tokens = tokens_seen(),
      .exposed_comm_ms = wait_and_take_exposed_ms(state_)};
  metrics.experts = experts_->metrics();
  if (!std::exchange(reported_start_, true)) {
    start_clock_.end(&StartTimes::step_s);
    metrics.start_times = start_clock_.times();
  }
  meter_->measure(metrics);
  const MemoryStats memory = memory_stats(device_);
  metrics.memory_allocated_bytes = memory.allocated_bytes;
  metrics.memory_peak_bytes = memory.peak_allocated_bytes;
  metrics.memory_reserved_bytes = memory.peak_reserved_bytes;
  metrics.memory_total_bytes = memory.capacity_bytes;
  if (output_) {
    output_->step(metrics);
  }
  FLATSHARD_CHECK(
      !loss || std::isfinite(*loss),
      usage,
      "the loss of step {} is {}; lower optimizer.lr or check the data",
      step,
      loss.value_or(0));
  meter_->restart();
}

Requests Trainer::take_requests(std::int64_t step) {
  const Requests asked = requests_->take(meter_->step_ms());
  if (output_) {
    output_->requested(asked, step, checkpoints_->enabled());
  }
  return asked;
}

void Trainer::save_if(bool asked, std::int64_t step) {
  if (checkpoints_->due(step) || (asked && checkpoints_->enabled())) {
    guard_->check_kept(step);
    state_.optimizer->wait();
    checkpoints_->save(step);
  }
  checkpoints_->report();
}

void Trainer::send_weights_if_due(std::int64_t step) {
  if (sender_ && sender_->due(step)) {
    state_.runtime->synchronize();
    state_.optimizer->wait();
    sender_->send(step);
    meter_->restart();
  }
}

void Trainer::show_progress(std::int64_t step, const at::Tensor& loss) {
  if (output_) {
    // A GPU's would have to be waited for.
    const bool shows_loss =
        output_->shows_progress() && !device_.is_cuda() && loss.defined();
    output_->progress(
        step,
        shows_loss ? std::optional(loss.item<double>()) : std::nullopt,
        tokens_seen());
  }
}

std::int64_t Trainer::tokens_seen() const {
  return loader_.state().samples_consumed * config_.training.seq_len;
}

void Trainer::finish(const std::optional<Stop>& stop) {
  if (output_) {
    output_->end_progress();
  }
  open_output();  // no step was left, only the output after the last one
  if (!stop && config_.run.save_weights) {
    save_model();
  }
  checkpoints_->finish();  // throws when the last one failed
  if (output_ && config_.cuda_graph.enabled()) {
    const GraphStats stats = microbatches_->graph_stats();
    output_->graphs(stop ? stop->step : config_.training.steps, stats);
    // At the start they were not captured.
    output_->print(to_string(memory_rows(state_, stats)));
  }
  if (stop || !output_) {
    return;
  }
  if (config_.checkpoint.export_hf_at_end) {
    const auto to = std::filesystem::path(config_.run.output_dir) / kRunExport;
    // Exists if this run was resumed: a new run moves an earlier run away.
    std::filesystem::remove_all(to);
    output_->print(export_hf(
        {.run = step_folder(
             options_.output.files.checkpoints,
             *checkpoints_->last_saved()),
         .to = to}));
  }
  output_->ended(config_.training.steps);
}

void Trainer::save_model() {
  state_.runtime->synchronize();
  state_.optimizer->wait();
  if (state_.lora) {
    for_option(kOutputDir, [&] {
      save_adapter(
          peft_config_text(
              state_.lora->config,
              config_.model.init_from,
              model_config_),
          model_config_,
          state_.runtime->groups(),
          config_.run.output_dir);
    });
    if (output_) {
      output_->print(
          fmt::format("saved the adapter in {}", config_.run.output_dir));
    }
    return;
  }
  const auto groups = state_.runtime->all_groups();
  const auto path = std::filesystem::path(config_.run.output_dir) / kRunWeights;
  for_option(kOutputDir, [&] {
    save_weights(
        {groups.begin(), groups.end()},
        path,
        {{"format", "pt"}},
        models::hf_entries_of(model_config_),
        experts_->buffers());
  });
  if (output_) {
    output_->print(fmt::format("saved {}", path.string()));
  }
}

}  // namespace flatshard
