#include "flatshard/train/metrics/metric_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "flatshard/train/metrics/number_text.h"

namespace flatshard {
namespace {

/// A value or a text of the metrics `m`.
#define STEP(...) \
  [](const StepMetrics& m) -> MetricValue { return __VA_ARGS__; }
#define STEP_TEXT(...) \
  [](const StepMetrics& m) -> std::string { return __VA_ARGS__; }
/// The same of its experts `e`; nothing without experts.
#define EXPERTS(...)                                            \
  [](const StepMetrics& m) -> MetricValue {                     \
    const auto of = [](const ExpertMetrics& e) -> MetricValue { \
      return __VA_ARGS__;                                       \
    };                                                          \
    return m.experts ? of(*m.experts) : MetricValue();          \
  }
#define EXPERTS_TEXT(...)                                       \
  [](const StepMetrics& m) -> std::string {                     \
    const auto of = [](const ExpertMetrics& e) -> std::string { \
      return __VA_ARGS__;                                       \
    };                                                          \
    return m.experts ? of(*m.experts) : "";                     \
  }
/// The same of the times `t` of its start; nothing after the first step.
#define START(...)                                             \
  [](const StepMetrics& m) -> MetricValue {                    \
    const auto of = [](const StartTimes& t) -> MetricValue {   \
      return __VA_ARGS__;                                      \
    };                                                         \
    return m.start_times ? of(*m.start_times) : MetricValue(); \
  }
#define VALIDATION(...) \
  [](const ValidationMetrics& m) -> MetricValue { return __VA_ARGS__; }
#define VALIDATION_TEXT(...) \
  [](const ValidationMetrics& m) -> std::string { return __VA_ARGS__; }

std::string memory_text(const StepMetrics& m) {
  const double share = m.memory_total_bytes > 0
                           ? 100.0 *
                                 static_cast<double>(m.memory_reserved_bytes) /
                                 static_cast<double>(m.memory_total_bytes)
                           : 0.0;
  return fmt::format(
      "memory: {:.2f}GiB({:.2f}%)",
      static_cast<double>(m.memory_reserved_bytes) / kGiB,
      share);
}

std::string speed_text(const StepMetrics& m) {
  const auto all = std::llround(m.tokens_per_s);
  const auto each = std::llround(m.tokens_per_s_per_rank);
  return fmt::format(
      "tps: {}{}",
      with_commas(all),
      all == each ? "" : fmt::format(" ({}/rank)", with_commas(each)));
}

std::string start_text(const StepMetrics& m) {
  if (!m.start_times) {
    return "";
  }
  const StartTimes& t = *m.start_times;
  return fmt::format(
      "start: {:.1f}s (program {:.1f}, device {:.1f}, ranks {:.1f}, model "
      "{:.1f}, weights {:.1f}, step {:.1f})",
      t.total_s(),
      t.program_s,
      t.device_s,
      t.ranks_s,
      t.model_s,
      t.weights_s,
      t.step_s);
}

std::string flops_text(const StepMetrics& m) {
  // A small model on a CPU has thousandths of a TFLOP/s.
  constexpr double kTwoDigitsShow = 0.1;
  return m.tflops_per_rank < kTwoDigitsShow
             ? fmt::format("tflops: {:.2g}", m.tflops_per_rank)
             : fmt::format("tflops: {:.2f}", m.tflops_per_rank);
}

const Metric<StepMetrics> kStepMetrics[] =
    {{.key = "loss",
      .help = "nats per token, mean over the trained tokens of the global "
              "batch. Null if there are none",
      .value = STEP(m.loss),
      .null_if_unset = true,
      .tag = "train/loss",
      .lines = {{.chart = "Loss", .label = "training"}},
      .printed =
          {1,
           STEP_TEXT(
               m.loss ? fmt::format("loss: {:.4f}", *m.loss) : "loss: none")}},
     {.key = "grad_norm",
      .help = "2-norm of the gradient before clipping",
      .value = STEP(m.grad_norm),
      .tag = "train/grad_norm",
      .lines = {{.chart = "Gradient norm", .label = "norm"}},
      .printed = {2, STEP_TEXT(fmt::format("grad_norm: {:.4f}", m.grad_norm))}},
     {.key = "lr",
      .help = "learning rate",
      .value = STEP(m.lr),
      .tag = "train/lr",
      .lines = {{.chart = "Learning rate", .label = "rate", .is_rough = false}},
      .printed = {3, STEP_TEXT(fmt::format("lr: {:.3g}", m.lr))}},
     {.key = "tokens",
      .help = "total tokens so far",
      .value = STEP(m.tokens),
      .tag = "train/tokens"},
     {.key = "step_ms",
      .help = "step time",
      .value = STEP(m.step_ms),
      .tag = "time/step_ms",
      .lines = {{.chart = "Time of a step", .label = "whole step"}}},
     {.key = "data_ms",
      .help = "time that the host waits for the loader",
      .value = STEP(m.data_ms),
      .tag = "time/data_ms",
      .lines = {{.chart = "Waiting time", .label = "for data", .color = 1}}},
     {.key = "host_ms",
      .help = "time that the host needs to launch the step, without waits",
      .value = STEP(m.host_ms),
      .tag = "time/host_ms",
      .lines =
          {{.chart = "Time of a step",
            .label = "host launches it",
            .color = 1}}},
     {.key = "exposed_comm_ms",
      .help = "time that compute waits for collectives, in this step only",
      .value = STEP(m.exposed_comm_ms),
      .tag = "time/exposed_comm_ms",
      .lines = {{.chart = "Waiting time", .label = "for communication"}}},
     {.key = "tokens_per_s",
      .help = "tokens per second of all ranks",
      .value = STEP(m.tokens_per_s),
      .tag = "speed/tokens_per_s",
      .lines = {{.chart = "Throughput", .label = "tokens/s"}},
      .printed = {5, speed_text}},
     {.key = "tokens_per_s_per_rank",
      .help = "tokens per second of one rank",
      .value = STEP(m.tokens_per_s_per_rank),
      .tag = "speed/tokens_per_s_per_rank"},
     {.key = "tflops_per_rank",
      .help = "model FLOP/s per rank, in 1e12",
      .value = STEP(m.tflops_per_rank),
      .tag = "speed/tflops_per_rank",
      .lines = {{.chart = "Model FLOP/s", .label = "TFLOP/s"}},
      .printed = {6, flops_text}},
     {.key = "mfu",
      .help = "in [0, 1]. Null if the device's peak is unknown",
      .value = STEP(m.mfu),
      .null_if_unset = true,
      .tag = "speed/mfu",
      .lines =
          {{.chart = "Model FLOPs utilization", .label = "MFU", .scale = 100}},
      .printed =
          {7,
           STEP_TEXT(
               m.mfu ? fmt::format("mfu: {:.2f}%", 100.0 * *m.mfu)
                     : "mfu: N/A")}},
     {.key = "memory_allocated_bytes",
      .help = "on rank 0's device. On a CPU, resident memory",
      .value = STEP(m.memory_allocated_bytes),
      .tag = "memory/allocated_bytes",
      .lines =
          {{.chart = "Memory",
            .label = "allocated",
            .color = 0,
            .scale = 1 / kGiB,
            .is_rough = false}}},
     {.key = "memory_peak_bytes",
      .help = "highest allocated so far",
      .value = STEP(m.memory_peak_bytes),
      .tag = "memory/peak_bytes",
      .lines =
          {{.chart = "Memory",
            .label = "peak allocated",
            .color = 1,
            .scale = 1 / kGiB,
            .is_rough = false}}},
     {.key = "memory_reserved_bytes",
      .help = "highest reserved so far",
      .value = STEP(m.memory_reserved_bytes),
      .tag = "memory/reserved_bytes",
      .lines =
          {{.chart = "Memory",
            .label = "peak reserved",
            .color = 2,
            .scale = 1 / kGiB,
            .is_rough = false}},
      .printed = {4, memory_text}},
     {.key = "memory_total_bytes",
      .help = "the device's memory",
      .value = STEP(m.memory_total_bytes)},
     {.key = "startup.total_s",
      .help = "seconds from the start of the program to the end of the first "
              "step. Only in this row, as the six that follow",
      .value = START(t.total_s()),
      .printed = {13, start_text}},
     {.key = "startup.program_s",
      .help = "loading the program and its libraries",
      .value = START(t.program_s)},
     {.key = "startup.device_s",
      .help = "opening the data and the device",
      .value = START(t.device_s)},
     {.key = "startup.ranks_s",
      .help = "connecting the ranks",
      .value = START(t.ranks_s)},
     {.key = "startup.model_s",
      .help = "making the model and its random weights",
      .value = START(t.model_s)},
     {.key = "startup.weights_s",
      .help = "loading weights",
      .value = START(t.weights_s)},
     {.key = "startup.step_s",
      .help = "the first step",
      .value = START(t.step_s)},
     {.key = "experts.load",
      .help = "tokens of the busiest expert over the mean, in the worst layer",
      .value = EXPERTS(e.load),
      .tag = "experts/load",
      .lines = {{.chart = "Busiest expert", .label = "load", .color = 3}},
      .printed =
          {8, EXPERTS_TEXT(fmt::format("experts: load {:.2f}x", e.load))}},
     {.key = "experts.dropped",
      .help = "fraction of dropped choices, in the worst layer",
      .value = EXPERTS(e.dropped),
      .tag = "experts/dropped",
      .lines =
          {{.chart = "Dropped tokens",
            .label = "dropped",
            .color = 3,
            .scale = 100}},
      .printed =
          {9, EXPERTS_TEXT(fmt::format("dropped {:.2f}%", 100.0 * e.dropped))}},
     {.key = "experts.balance",
      .help = "load-balancing loss without its coefficient, mean over layers",
      .value = EXPERTS(e.balance),
      .tag = "experts/balance",
      .lines =
          {{.chart = "Load-balancing loss", .label = "balance", .color = 3}},
      .printed = {10, EXPERTS_TEXT(fmt::format("balance {:.4f}", e.balance))}},
     {.key = "experts.exposed_exchange_ms",
      .help = "time that compute waits for tokens. Left out if tokens stay on "
              "their rank",
      .value = EXPERTS(e.exchange_ms),
      .tag = "time/exposed_exchange_ms",
      .lines =
          {{.chart = "Waiting time",
            .label = "for tokens of experts",
            .color = 2}},
      .printed =
          {12,
           EXPERTS_TEXT(
               e.exchange_ms ? fmt::format("exchange {:.1f}ms", *e.exchange_ms)
                             : "")}},
     {.key = "experts.bias",
      .help = "largest magnitude of the router's bias. Left out without a bias",
      .value = EXPERTS(e.bias),
      .tag = "experts/bias",
      .lines = {{.chart = "Router bias", .label = "bias", .color = 3}},
      .printed = {
          11,
          EXPERTS_TEXT(e.bias ? fmt::format("bias {:.3g}", *e.bias) : "")}}};

const Metric<ValidationMetrics> kValidationMetrics[] = {
    {.key = "validation_loss",
     .help = "nats per token",
     .value = VALIDATION(m.loss),
     .tag = "validation/loss",
     .lines =
         {{.chart = "Loss",
           .label = "validation",
           .color = 1,
           .is_rough = false},
          {.chart = "Validation loss",
           .label = "all",
           .color = 1,
           .is_rough = false}},
     .printed =
         {1, VALIDATION_TEXT(fmt::format("validation_loss: {:.4f}", m.loss))}},
    {.key = "perplexity",
     .help = "exp(`validation_loss`)",
     .value = VALIDATION(m.perplexity()),
     .tag = "validation/perplexity",
     .printed =
         {2,
          VALIDATION_TEXT(fmt::format("perplexity: {:.4f}", m.perplexity()))}},
    {.key = "bits_per_byte",
     .help = "only with byte tokens",
     .value = VALIDATION(m.bits_per_byte),
     .tag = "validation/bits_per_byte",
     .lines =
         {{.chart = "Bits per byte",
           .label = "bits per byte",
           .color = 1,
           .is_rough = false}},
     .printed = {
         3,
         VALIDATION_TEXT(
             m.bits_per_byte
                 ? fmt::format("bits_per_byte: {:.4f}", *m.bits_per_byte)
                 : "")}}};

}  // namespace

std::span<const Metric<StepMetrics>> step_metrics() {
  return kStepMetrics;
}

std::span<const Metric<ValidationMetrics>> validation_metrics() {
  return kValidationMetrics;
}

template <class Values>
std::string printed_parts(
    std::span<const Metric<Values>> metrics,
    const Values& values) {
  std::vector<std::pair<int, std::string>> parts;
  for (const Metric<Values>& metric : metrics) {
    if (metric.printed.text != nullptr) {
      parts.emplace_back(metric.printed.place, metric.printed.text(values));
    }
  }
  std::ranges::sort(parts);
  std::vector<std::string> texts;
  for (auto& [place, text] : parts) {
    if (!text.empty()) {
      texts.push_back(std::move(text));
    }
  }
  return fmt::to_string(fmt::join(texts, "  "));
}

template std::string printed_parts(
    std::span<const Metric<StepMetrics>>,
    const StepMetrics&);
template std::string printed_parts(
    std::span<const Metric<ValidationMetrics>>,
    const ValidationMetrics&);

}  // namespace flatshard
