#include "flatshard/train/metrics/metrics.h"

#include <fmt/format.h>

#include <cmath>

#include "flatshard/train/metrics/number_text.h"

namespace flatshard {

namespace {

std::string format_experts(const ExpertMetrics& experts) {
  return fmt::format(
      "  experts: load {:.2f}x  dropped {:.2f}%  balance {:.4f}{}{}",
      experts.load,
      100.0 * experts.dropped,
      experts.balance,
      experts.bias ? fmt::format("  bias {:.3g}", *experts.bias) : "",
      experts.exchange_ms
          ? fmt::format("  exchange {:.1f}ms", *experts.exchange_ms)
          : "");
}

}  // namespace

std::string format_step(const StepMetrics& metrics) {
  const double share =
      metrics.memory_total_bytes > 0
          ? 100.0 * static_cast<double>(metrics.memory_reserved_bytes) /
                static_cast<double>(metrics.memory_total_bytes)
          : 0.0;
  const auto all = std::llround(metrics.tokens_per_s);
  const auto each = std::llround(metrics.tokens_per_s_per_rank);
  // A small model on a CPU has thousandths of a TFLOP/s.
  constexpr double kTwoDigitsShow = 0.1;
  return fmt::format(
      "step: {}{}  loss: {}  grad_norm: {:.4f}  lr: {:.3g}  memory: "
      "{:.2f}GiB({:.2f}%)  tps: {}{}  tflops: {}  mfu: {}{}",
      metrics.step,
      metrics.steps > 0 ? fmt::format("/{}", metrics.steps) : "",
      metrics.loss ? fmt::format("{:.4f}", *metrics.loss) : "none",
      metrics.grad_norm,
      metrics.lr,
      static_cast<double>(metrics.memory_reserved_bytes) / kGiB,
      share,
      with_commas(all),
      all == each ? "" : fmt::format(" ({}/rank)", with_commas(each)),
      metrics.tflops_per_rank < kTwoDigitsShow
          ? fmt::format("{:.2g}", metrics.tflops_per_rank)
          : fmt::format("{:.2f}", metrics.tflops_per_rank),
      metrics.mfu ? fmt::format("{:.2f}%", 100.0 * *metrics.mfu) : "N/A",
      metrics.experts ? format_experts(*metrics.experts) : "");
}

double ValidationMetrics::perplexity() const {
  return std::exp(loss);
}

std::string format_validation(const ValidationMetrics& metrics) {
  return fmt::format(
      "step: {}  validation_loss: {:.4f}  perplexity: {:.4f}{}",
      metrics.step,
      metrics.loss,
      metrics.perplexity(),
      metrics.bits_per_byte
          ? fmt::format("  bits_per_byte: {:.4f}", *metrics.bits_per_byte)
          : "");
}

}  // namespace flatshard
