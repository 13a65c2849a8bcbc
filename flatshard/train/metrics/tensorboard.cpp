#include "flatshard/train/metrics/tensorboard.h"

#include <chrono>

#include "flatshard/core/file_writer.h"

namespace flatshard {
namespace {

double now_s() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

const std::filesystem::path& made(const std::filesystem::path& folder) {
  make_folder(folder);
  return folder;
}

}  // namespace

TensorboardLog::TensorboardLog(
    const std::filesystem::path& folder,
    int attempt,
    std::int64_t done)
    : file_(made(folder), now_s(), attempt) {
  if (attempt > 1) {
    rewind(done);
  }
}

void TensorboardLog::rewind(std::int64_t step) {
  file_.restart(now_s(), step + 1);
}

void TensorboardLog::write(const StepMetrics& metrics) {
  const auto number = [](std::int64_t value) {
    return static_cast<double>(value);
  };
  EventFile::Scalars values{
      {"train/grad_norm", metrics.grad_norm},
      {"train/lr", metrics.lr},
      {"train/tokens", number(metrics.tokens)},
      {"speed/tokens_per_s", metrics.tokens_per_s},
      {"speed/tokens_per_s_per_rank", metrics.tokens_per_s_per_rank},
      {"speed/tflops_per_rank", metrics.tflops_per_rank},
      {"time/step_ms", metrics.step_ms},
      {"time/data_ms", metrics.data_ms},
      {"time/host_ms", metrics.host_ms},
      {"time/exposed_comm_ms", metrics.exposed_comm_ms},
      {"memory/allocated_bytes", number(metrics.memory_allocated_bytes)},
      {"memory/peak_bytes", number(metrics.memory_peak_bytes)},
      {"memory/reserved_bytes", number(metrics.memory_reserved_bytes)}};
  if (metrics.loss) {
    values.insert(values.begin(), {"train/loss", *metrics.loss});
  }
  if (metrics.mfu) {
    values.emplace_back("speed/mfu", *metrics.mfu);
  }
  if (metrics.experts) {
    values.emplace_back("experts/load", metrics.experts->load);
    values.emplace_back("experts/dropped", metrics.experts->dropped);
    values.emplace_back("experts/balance", metrics.experts->balance);
    if (metrics.experts->bias) {
      values.emplace_back("experts/bias", *metrics.experts->bias);
    }
    if (metrics.experts->exchange_ms) {
      values.emplace_back(
          "time/exposed_exchange_ms",
          *metrics.experts->exchange_ms);
    }
  }
  file_.write(now_s(), metrics.step, values);
}

void TensorboardLog::write_validation(const ValidationMetrics& metrics) {
  EventFile::Scalars values{
      {"validation/loss", metrics.loss},
      {"validation/perplexity", metrics.perplexity()}};
  if (metrics.bits_per_byte) {
    values.emplace_back("validation/bits_per_byte", *metrics.bits_per_byte);
  }
  for (const auto& [folder, loss] : metrics.parts) {
    values.emplace_back("validation/loss of " + folder, loss);
  }
  file_.write(now_s(), metrics.step, values);
}

}  // namespace flatshard
