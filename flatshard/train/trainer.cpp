#include "flatshard/train/trainer.h"

#include "flatshard/checkpoint/weights_file.h"
#include "flatshard/comm/collective_scope.h"
#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/device/device_name.h"
#include "flatshard/device/memory.h"
#include "flatshard/diagnostics/nan_check.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/flight/recorder.h"
#include "flatshard/format/checkpoint_folder.h"
#include "flatshard/models/flops.h"
#include "flatshard/models/hf_names.h"
#include "flatshard/optim/grad_norm.h"
#include "flatshard/train/export_hf.h"
#include "flatshard/train/nonfinite.h"
#include "flatshard/train/option_errors.h"
#include "flatshard/train/peak_flops.h"
#include "flatshard/train/profile.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>

namespace flatshard {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

// Dense bf16 peak of the GPU in FLOP/s, for mfu; unset when unknown.
std::optional<double> peak_flops(at::Device device, const Config& config) {
  if (device.is_cuda() && config.precision.compute == "bfloat16") {
    static const std::string name = cuda_device_name(device);
    return dense_bf16_flops(name);
  }
  return std::nullopt;
}

}  // namespace

struct Trainer::Interval {
  Clock::time_point begin = Clock::now();
  std::int64_t steps = 0;
  double data_ms = 0;
  double host_ms = 0;
};

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

void Trainer::load(
    const std::function<void(std::span<std::int64_t>, std::span<std::int64_t>)>&
        fill,
    Interval& interval) {
  const auto begin = Clock::now();
  tokens_copied_.synchronize();  // the last copy from the pinned buffers
  mesh_->check();
  const auto span = [](const at::Tensor& t) {
    return std::span<std::int64_t>(
        t.data_ptr<std::int64_t>(),
        static_cast<std::size_t>(t.numel()));
  };
  fill(span(tokens_host_), span(targets_host_));
  tokens_.copy_(tokens_host_, /*non_blocking=*/true);
  targets_.copy_(targets_host_, /*non_blocking=*/true);
  tokens_copied_.record(*current_stream(device_));
  interval.data_ms += ms_since(begin);
}

at::Tensor Trainer::forward_backward(std::int64_t step, Interval& interval) {
  runtime_->set_step(step);
  at::Tensor sum;
  for (std::int64_t m = 0; m < num_microbatches_; ++m) {
    const data::BatchSlot slot{
        .rank = env_.rank,
        .world = env_.world_size,
        .local_batch = config_.training.local_batch_size,
        .microbatch = m};
    load(
        [&](auto tokens, auto targets) {
          for_option("data.train", [&] {
            train_loader_->read(slot, tokens, targets);
          });
        },
        interval);
    const auto begin = Clock::now();
    runtime_->set_is_last_microbatch(m == num_microbatches_ - 1);
    const at::Tensor loss = model_(tokens_, targets_);
    (num_microbatches_ == 1 ? loss
                            : loss / static_cast<double>(num_microbatches_))
        .backward();
    const at::Tensor value = loss.detach();
    sum = sum.defined() ? sum + value : value;
    interval.host_ms += ms_since(begin);
  }
  train_loader_->advance();
  return sum / static_cast<double>(num_microbatches_);
}

double Trainer::mean_over_ranks(const at::Tensor& loss) {
  const at::Tensor mean = loss.to(at::kFloat).reshape({1}).clone();
  if (env_.world_size > 1) {
    const CollectiveScope scope("loss");
    mesh_->world(Purpose::reduce).all_reduce(mean, ReduceOp::avg);
  }
  const double value = mean.item<double>();
  mesh_->check();  // an aborted collective ends without a result
  return value;
}

ValidationMetrics Trainer::validate(std::int64_t step) {
  const at::NoGradGuard no_grad;
  Interval unused;
  const std::int64_t seq_len = config_.training.seq_len;
  const std::int64_t local_batch = config_.training.local_batch_size;
  // Of each set: the loss of its tokens, and how many of them are bytes.
  const auto num_sets = static_cast<std::int64_t>(validation_sets_.size());
  const at::Tensor sums = at::zeros({num_sets, 2}, at::kDouble);
  for (std::int64_t s = 0; s < num_sets; ++s) {
    const ValidationSet& set = validation_sets_[static_cast<std::size_t>(s)];
    at::Tensor loss =
        at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device_));
    std::int64_t num_bytes = 0;
    // All ranks take part in each batch, also where the last one is short.
    for (std::int64_t begin = 0; begin < set.num_sequences;
         begin += local_batch * env_.world_size) {
      const std::int64_t mine = begin + local_batch * env_.rank;
      const std::int64_t count =
          std::clamp<std::int64_t>(set.num_sequences - mine, 0, local_batch);
      load(
          [&](auto tokens, auto targets) {
            num_bytes += set.read(mine, count, tokens, targets);
          },
          unused);
      loss += model_(tokens_, targets_).to(at::kDouble) *
              static_cast<double>(count * seq_len);
    }
    sums[s][0] = loss.cpu();
    sums[s][1] = static_cast<double>(num_bytes);
  }
  if (env_.world_size > 1) {
    const CollectiveScope scope("validation");
    const at::Tensor shared = sums.to(device_);
    mesh_->world(Purpose::reduce).all_reduce(shared, ReduceOp::sum);
    sums.copy_(shared);
  }
  mesh_->check();  // an aborted collective ends without a result
  return summarize(
      validation_sets_,
      step,
      {sums.data_ptr<double>(), static_cast<std::size_t>(sums.numel())});
}

std::int64_t Trainer::give_up_step(std::int64_t step) {
  // So many in a row are no accident of the data.
  constexpr std::int64_t kMostInARow = 10;
  const std::string& wanted = config_.training.on_nonfinite;
  const std::string what = name_nonfinite_gradient(*runtime_, *mesh_);
  FLATSHARD_CHECK(
      wanted != "stop" && ++num_given_up_ <= kMostInARow,
      usage,
      "the gradient of step {} is not finite{}: {}; lower optimizer.lr, check "
      "the data, or set training.on_nonfinite to skip or rewind",
      step,
      wanted == "stop" ? ""
                       : fmt::format(", for the {}th time", kMostInARow + 1),
      what);
  optimizer_->zero_grad();
  optimizer_->wait();
  runtime_->finish_step();
  std::int64_t last = step;
  if (wanted == "rewind") {
    checkpoints_->finish();
    FLATSHARD_CHECK(
        checkpoints_->last_saved(),
        usage,
        "the gradient of step {} is not finite, and there is no checkpoint to "
        "rewind to yet: {}; lower checkpoint.interval",
        step,
        what);
    last = *checkpoints_->last_saved();
    const data::LoaderState place = train_loader_->state();
    checkpoints_->load(last);
    train_loader_->restore(place);  // past the data that did it
  }
  if (output_) {
    output_->nonfinite(step, what, last);
  }
  return last;
}

Trainer::Requests Trainer::requests(std::int64_t step) {
  const int mine = signals_->stop_signal();
  std::array<std::int64_t, 4> counts{
      static_cast<std::int64_t>(signals_->take_save_request()),
      static_cast<std::int64_t>(mine == SIGINT),
      static_cast<std::int64_t>(mine == SIGTERM),
      // Rank 0's clock counts.
      env_.rank == 0 ? std::llround(step_ms_ * 1000) : 0};
  if (env_.world_size > 1) {
    const at::Tensor sum =
        at::tensor(at::ArrayRef<std::int64_t>(counts)).to(device_);
    const CollectiveScope scope("signals");
    mesh_->world(Purpose::reduce).all_reduce(sum, ReduceOp::sum);
    const at::Tensor host = sum.cpu();
    mesh_->check();
    std::copy_n(
        host.const_data_ptr<std::int64_t>(),
        counts.size(),
        counts.begin());
    constexpr std::int64_t kLookEveryUs = 1'000'000;
    requests_freq_ = std::clamp<std::int64_t>(
        kLookEveryUs / std::max<std::int64_t>(counts[3], 1),
        1,
        config_.metrics.log_freq);
  }
  const Requests asked{
      .save = counts[0] > 0,
      .stop_signal = counts[2] > 0   ? SIGTERM
                     : counts[1] > 0 ? SIGINT
                                     : 0};
  if (!output_ || (!asked.save && asked.stop_signal == 0)) {
    return asked;
  }
  output_->status().clear();
  if (asked.stop_signal != 0) {
    log_info(
        "{}: ending after step {}{}; once more ends it at once",
        asked.stop_signal == SIGINT ? "SIGINT" : "SIGTERM",
        step,
        checkpoints_->enabled() ? " with a checkpoint" : "");
  } else if (!checkpoints_->enabled()) {
    log_warning("SIGUSR1: nothing is saved, since checkpoint.interval = 0");
  }
  return asked;
}

void Trainer::check_gradient_norms(std::int64_t step) {
  if (gradient_norms_.empty()) {
    return;
  }
  const auto looked_at = std::exchange(gradient_norms_, {});
  std::vector<at::Tensor> norms;
  norms.reserve(looked_at.size());
  for (const auto& [at, norm] : looked_at) {
    norms.push_back(norm);
  }
  const at::Tensor finite = at::isfinite(at::stack(norms)).cpu();
  mesh_->check();
  const bool* good = finite.const_data_ptr<bool>();
  const auto first = static_cast<std::size_t>(
      std::find(good, good + norms.size(), false) - good);
  FLATSHARD_CHECK(
      first == norms.size(),
      usage,
      "the gradient of step {} is not finite, as was seen in step {}; lower "
      "optimizer.lr, check the data, or set training.on_nonfinite to skip or "
      "rewind; metrics.log_freq = 1 looks at each step and names the parameter",
      looked_at[first].first,
      step);
}

void Trainer::log_step(
    std::int64_t step,
    const at::Tensor& loss,
    const at::Tensor& norm,
    double lr,
    Interval& interval) {
  const double mean_loss = mean_over_ranks(loss);  // waits for the device
  const auto steps = static_cast<double>(interval.steps);
  const double step_ms = ms_since(interval.begin) / steps;
  const double tokens = static_cast<double>(
      config_.training.global_batch_size * config_.training.seq_len);
  const MemoryStats memory = memory_stats(device_);
  StepMetrics metrics{
      .step = step,
      .steps = config_.training.steps,
      .loss = mean_loss,
      .grad_norm = norm.item<double>(),
      .lr = lr,
      .step_ms = step_ms,
      .data_ms = interval.data_ms / steps,
      .host_ms = interval.host_ms / steps,
      .exposed_comm_ms = runtime_->wait_and_take_exposed_ms(),
      .tokens_per_s = tokens / (step_ms * 1e-3),
      .tokens_per_s_per_rank = tokens / env_.world_size / (step_ms * 1e-3)};
  metrics.tflops_per_rank =
      metrics.tokens_per_s_per_rank * flops_per_token_ * 1e-12;
  if (const auto peak = peak_flops(device_, config_)) {
    metrics.mfu = metrics.tflops_per_rank * 1e12 / *peak;
  }
  metrics.memory_allocated_bytes = memory.allocated_bytes;
  metrics.memory_peak_bytes = memory.peak_allocated_bytes;
  metrics.memory_reserved_bytes = memory.peak_reserved_bytes;
  metrics.memory_total_bytes = memory.capacity_bytes;
  FLATSHARD_CHECK(
      std::isfinite(mean_loss),
      usage,
      "the loss of step {} is {}; lower optimizer.lr or check the data",
      step,
      mean_loss);
  if (output_) {
    output_->step(metrics);
  }
  step_ms_ = step_ms;
  interval = {};
}

Trainer::End Trainer::run() {
  End end = End::finished;
  if (!nothing_left_) {
    watched([&] { end = train(); });
  }
  return end;
}

Trainer::End Trainer::train() {
  const auto begin = Clock::now();
  Interval interval;
  double last_loss = 0;
  TraceRecorder recorder(device_);
  End end = End::finished;
  for (std::int64_t step = first_step_;
       step <= config_.training.steps && end == End::finished;
       ++step) {
    const bool last = step == config_.training.steps;
    const bool logged =
        step == first_step_ || last || step % config_.metrics.log_freq == 0;
    runtime_->set_measure_exposed(logged);
    const bool profile = config_.profiling.enabled &&
                         step == config_.profiling.step && env_.rank == 0;
    if (profile) {
      recorder.start();
    }
    const at::Tensor loss = forward_backward(step, interval);
    const auto host = Clock::now();
    const double lr = schedule_.lr(step - 1);
    spoil_gradient(step);
    const GradNorm clip =
        grad_norm_and_scale(runtime_->groups(), config_.training.max_norm);
    open_output();
    diagnose_gradients(step);
    bool finite = true;
    const bool stops = config_.training.on_nonfinite == "stop";
    if (logged || !stops) {
      const auto wait = Clock::now();
      check_gradient_norms(step);  // of the steps before
      finite = std::isfinite(clip.norm.item<double>());
      interval.host_ms -= ms_since(wait);  // the device's time, not the host's
    } else {
      gradient_norms_.emplace_back(step, clip.norm);
    }
    if (!finite) {
      mesh_->check();
      if (profile) {
        recorder.discard();
      }
      step = give_up_step(step);
      interval = {};
      continue;
    }
    num_given_up_ = 0;
    checkpoints_->before_update();
    optimizer_->step(lr, clip.scale);
    optimizer_->zero_grad();
    if (config_.diagnostics.nan_check) {
      optimizer_->wait();
      NanCheck::check_weights(*runtime_);
    }
    runtime_->finish_step();
    if (!last) {
      runtime_->prefetch_forward();
    }
    interval.host_ms += ms_since(host);
    ++interval.steps;
    if (profile) {
      report_profile(recorder, step);
    }
    Requests asked;
    if (logged) {
      runtime_->set_measure_exposed(false);
      log_step(step, loss, clip.norm, lr, interval);
    }
    if (logged || step % requests_freq_ == 0) {
      asked = requests(step);
    }
    const bool saves =
        checkpoints_->enabled() && (asked.save || asked.stop_signal != 0);
    if (checkpoints_->due(step) || saves) {
      check_gradient_norms(step);
      optimizer_->wait();
      checkpoints_->save(step);
    }
    checkpoints_->report();
    if (asked.stop_signal != 0 && !last) {
      end = End::stopped;
      stop_ = {
          .signal = asked.stop_signal,
          .step = step,
          .saved = checkpoints_->enabled()};
    }
    if (output_ && output_->status().enabled()) {
      if (!device_.is_cuda()) {
        last_loss = loss.item<double>();
      }
      output_->status().update(
          step,
          config_.training.steps,
          last_loss,
          ms_since(begin) * 1e-3,
          first_step_ - 1);
    }
    if (!validation_sets_.empty() && end == End::finished &&
        (last || step % config_.validation.freq == 0)) {
      const ValidationMetrics validation = validate(step);
      if (output_) {
        output_->validation(validation);
      }
      interval = {};
    }
  }
  if (output_) {
    output_->status().clear();
  }
  open_output();  // no step was left, only what comes after the last one
  if (end == End::finished && config_.run.save_weights) {
    save();
  }
  checkpoints_->finish();  // throws when the last one failed
  if (end == End::finished && config_.checkpoint.export_hf_at_end && output_) {
    const auto to = std::filesystem::path(config_.run.output_dir) / "hf";
    std::filesystem::remove_all(to);  // of the same run, when it was resumed
    output_->print(export_hf(
        {.run = step_folder(
             checkpoint_folder(config_),
             *checkpoints_->last_saved()),
         .to = to}));
  }
  if (output_ && config_.cuda_graph.impl != "none") {
    output_->graphs(
        end == End::finished ? config_.training.steps : stop_.step,
        runtime_->graph_stats());
  }
  if (end == End::finished && output_) {
    output_->ended(config_.training.steps);
  }
  return end;
}

void Trainer::report_profile(TraceRecorder& recorder, std::int64_t step) {
  const auto path = std::filesystem::path(config_.run.output_dir) /
                    config_.profiling.folder /
                    fmt::format("step_{}_rank_{}.json", step, env_.rank);
  const StepProfile profile = recorder.stop(path);
  if (!output_) {
    return;
  }
  output_->print(fmt::format("trace of step {}: {}", step, path.string()));
  if (profile.classes.empty()) {  // no GPU
    output_->print(recorder.host_table());
    return;
  }
  const Config::Training& t = config_.training;
  const double tokens =
      static_cast<double>(t.local_batch_size * t.seq_len * num_microbatches_);
  const double gemm =
      6.0 * static_cast<double>(models::num_matmul_parameters(model_config_)) *
      tokens;
  const double all = tokens * models::flops_per_token(
                                  model_config_,
                                  t.seq_len,
                                  models::FlopsConvention::causal);
  SpeedOfLight light;
  light.peak_flops = peak_flops(device_, config_).value_or(0);
  light.flops = {{"GEMM", gemm}, {"attention", all - gemm}};
  output_->print(to_string(profile, light));
}

void Trainer::spoil_gradient(std::int64_t step) {
  if (step != config_.debug.spoil_gradient_step || spoilt_) {
    return;
  }
  spoilt_ = true;  // once, also when the step comes again
  if (env_.rank == 0) {
    const at::Tensor grad =
        runtime_->groups().front()->gradients().reduced().local();
    grad.narrow(0, 0, 1).fill_(std::nan(""));
  }
}

void Trainer::diagnose_gradients(std::int64_t step) {
  if (config_.diagnostics.nan_check) {
    NanCheck::check_reduced_gradients(*runtime_);
  }
  const std::int64_t freq = config_.diagnostics.norms_freq;
  if (freq > 0 &&
      (step == 1 || step == config_.training.steps || step % freq == 0)) {
    const auto norms = parameter_norms(*runtime_);
    if (output_) {
      output_->norms(step, norms);
    }
  }
}

std::vector<ParamGroup*> Trainer::all_groups() const {
  return runtime_->all_groups();
}

void Trainer::save() {
  runtime_->synchronize();
  optimizer_->wait();
  const auto groups = all_groups();
  const auto path =
      std::filesystem::path(config_.run.output_dir) / "model.safetensors";
  for_option(kOutputDir, [&] {
    save_weights(
        {groups.begin(), groups.end()},
        path,
        {{"format", "pt"}},
        models::to_hf_name);
  });
  if (output_) {
    output_->print(fmt::format("saved {}", path.string()));
  }
}

}  // namespace flatshard
