#include "flatshard/train/metrics.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/log.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/format/checkpoint_folder.h"

namespace flatshard {

std::string with_commas(std::int64_t value) {
  const std::string digits = fmt::format("{}", value);
  const std::size_t first = value < 0 ? 1 : 0;
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > first && (digits.size() - i) % 3 == 0) {
      text += ',';
    }
    text += digits[i];
  }
  return text;
}

std::string format_duration(double seconds) {
  const auto total = std::llround(std::clamp(seconds, 0.0, 1e9));
  if (total < 60) {
    return fmt::format("{}s", total);
  }
  if (total < 3600) {
    return fmt::format("{}m{:02}s", total / 60, total % 60);
  }
  return fmt::format("{}h{:02}m", total / 3600, total / 60 % 60);
}

std::string format_step(const StepMetrics& metrics) {
  const double share =
      metrics.memory_total_bytes > 0
          ? 100.0 * static_cast<double>(metrics.memory_reserved_bytes) /
                static_cast<double>(metrics.memory_total_bytes)
          : 0.0;
  return fmt::format(
      "step: {}  loss: {:.4f}  grad_norm: {:.4f}  memory: {:.2f}GiB({:.2f}%)  "
      "tps: {}  tflops: {:.2f}  mfu: {}",
      metrics.step,
      metrics.loss,
      metrics.grad_norm,
      static_cast<double>(metrics.memory_reserved_bytes) / kGiB,
      share,
      with_commas(std::llround(metrics.tokens_per_s_per_rank)),
      metrics.tflops_per_rank,
      metrics.mfu ? fmt::format("{:.2f}%", 100.0 * *metrics.mfu) : "N/A");
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

MetricsFile::MetricsFile(const std::filesystem::path& path, Mode mode)
    : path_(path),
      fd_(::open(
          path.c_str(),
          O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND |
              (mode == Mode::append ? 0 : O_TRUNC),
          0644)) {
  FLATSHARD_CHECK(
      fd_ >= 0,
      io,
      "cannot write {}: {}",
      path.string(),
      std::strerror(errno));
}

MetricsFile::~MetricsFile() {
  ::close(fd_);
}

void MetricsFile::write(const StepMetrics& metrics) {
  nlohmann::ordered_json row;
  row["step"] = metrics.step;
  row["loss"] = metrics.loss;
  row["grad_norm"] = metrics.grad_norm;
  row["lr"] = metrics.lr;
  row["step_ms"] = metrics.step_ms;
  row["data_ms"] = metrics.data_ms;
  row["host_ms"] = metrics.host_ms;
  row["exposed_comm_ms"] = metrics.exposed_comm_ms;
  row["tokens_per_s_per_rank"] = metrics.tokens_per_s_per_rank;
  row["tflops_per_rank"] = metrics.tflops_per_rank;
  row["mfu"] = nullptr;
  if (metrics.mfu) {
    row["mfu"] = *metrics.mfu;
  }
  row["memory_allocated_bytes"] = metrics.memory_allocated_bytes;
  row["memory_peak_bytes"] = metrics.memory_peak_bytes;
  row["memory_reserved_bytes"] = metrics.memory_reserved_bytes;
  row["memory_total_bytes"] = metrics.memory_total_bytes;
  write_line(row.dump());
}

void MetricsFile::write_validation(const ValidationMetrics& metrics) {
  nlohmann::ordered_json row;
  row["step"] = metrics.step;
  row["validation_loss"] = metrics.loss;
  row["perplexity"] = metrics.perplexity();
  if (metrics.bits_per_byte) {
    row["bits_per_byte"] = *metrics.bits_per_byte;
  }
  for (const auto& [folder, loss] : metrics.parts) {
    row["validation_losses"][folder] = loss;
  }
  write_line(row.dump());
}

void MetricsFile::write_nonfinite(
    std::int64_t step,
    const std::string& what,
    std::int64_t goes_on_after) {
  nlohmann::ordered_json row;
  row["step"] = step;
  row["nonfinite"] = what;
  row["goes_on_after"] = goes_on_after;
  write_line(row.dump());
}

void MetricsFile::write_norms(
    std::int64_t step,
    const std::vector<ParameterNorm>& norms) {
  auto weights = nlohmann::ordered_json::object();
  auto grads = nlohmann::ordered_json::object();
  for (const ParameterNorm& norm : norms) {
    weights[norm.name] = norm.weight;
    if (norm.grad) {
      grads[norm.name] = *norm.grad;
    }
  }
  nlohmann::ordered_json row;
  row["step"] = step;
  row["weight_norms"] = std::move(weights);
  row["grad_norms"] = std::move(grads);
  write_line(row.dump());
}

void MetricsFile::write_line(const std::string& line) {
  const std::string text = line + "\n";
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      const int error = errno;
      if (done > 0 && before >= 0 && ::ftruncate(fd_, before) != 0) {
        log_warning("{} ends with half a line", path_.string());
      }
      FLATSHARD_THROW(
          io,
          "cannot write {}: {}",
          path_.string(),
          std::strerror(error));
    }
    done += static_cast<std::size_t>(n);
  }
}

namespace {

/// What a run writes from its start on, below its output folder.
std::vector<std::filesystem::path> files_of_a_run(
    const std::filesystem::path& checkpoints) {
  std::vector<std::filesystem::path> files{"config.toml", "metrics.jsonl"};
  if (checkpoints.is_relative()) {
    files.push_back(checkpoints);
  }
  return files;
}

/// Not /dev/null and the like, which hold nothing.
bool holds_something(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error) ||
         !list_checkpoints(path).empty();
}

}  // namespace

std::filesystem::path keep_earlier_run(
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints) {
  namespace fs = std::filesystem;
  FLATSHARD_CHECK(
      checkpoints.is_relative() || list_checkpoints(checkpoints).empty(),
      config,
      "checkpoint.folder = {} holds the checkpoints of another run; go on from "
      "them with --resume, or choose another folder",
      checkpoints.string());
  fs::path kept;
  for (const fs::path& name : files_of_a_run(checkpoints)) {
    if (!holds_something(output_dir / name)) {
      continue;
    }
    std::error_code error;
    for (int n = 1; kept.empty(); ++n) {
      const fs::path free = output_dir / "earlier" / std::to_string(n);
      if (!fs::exists(free, error)) {
        fs::create_directories(free, error);
        kept = free;
      }
    }
    if (!error) {
      fs::create_directories((kept / name).parent_path(), error);
      fs::rename(output_dir / name, kept / name, error);
    }
    FLATSHARD_CHECK(
        !error,
        io,
        "cannot keep {} of an earlier run in {}: {}",
        name.string(),
        kept.string(),
        error.message());
  }
  return kept;
}

void restore_earlier_run(
    const std::filesystem::path& kept,
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints) noexcept {
  std::error_code error;
  for (const auto& name : files_of_a_run(checkpoints)) {
    if (std::filesystem::exists(kept / name, error)) {
      std::filesystem::rename(kept / name, output_dir / name, error);
    }
  }
  std::filesystem::remove(kept, error);
  std::filesystem::remove(kept.parent_path(), error);  // when it is empty
}

StatusLine::StatusLine(std::FILE* stream)
    : stream_(stream), enabled_(::isatty(fileno(stream)) == 1) {
}

StatusLine::~StatusLine() {
  clear();
}

void StatusLine::update(
    std::int64_t done,
    std::int64_t total,
    double loss,
    double elapsed_s,
    std::int64_t first) {
  if (!enabled_) {
    return;
  }
  winsize size{};
  const int width =
      ::ioctl(fileno(stream_), TIOCGWINSZ, &size) == 0 && size.ws_col > 0
          ? size.ws_col
          : 80;
  const std::string text = render(done, total, loss, elapsed_s, first, width);
  std::fputs(("\r\033[K" + text).c_str(), stream_);
  std::fflush(stream_);
  shown_ = true;
}

void StatusLine::clear() {
  if (shown_) {
    std::fputs("\r\033[K", stream_);
    std::fflush(stream_);
    shown_ = false;
  }
}

std::string StatusLine::render(
    std::int64_t done,
    std::int64_t total,
    double loss,
    double elapsed_s,
    std::int64_t first,
    int width) {
  constexpr int kMaxBar = 40;
  const double share =
      total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 0.0;
  std::string tail = fmt::format(
      " {:3.0f}%  {}/{}  loss {:.4f}",
      100 * share,
      done,
      total,
      loss);
  if (done > first) {
    const double left_s = elapsed_s * static_cast<double>(total - done) /
                          static_cast<double>(done - first);
    tail += fmt::format("  {} left", format_duration(left_s));
  }
  // One column stays free: a full line makes some terminals wrap.
  const int bar = std::min(kMaxBar, width - 3 - static_cast<int>(tail.size()));
  if (bar < 4) {
    return tail.substr(1, static_cast<std::size_t>(std::max(0, width - 1)));
  }
  const auto full = static_cast<std::size_t>(
      std::clamp(std::lround(share * bar), 0L, static_cast<long>(bar)));
  return fmt::format(
      "[{}{}]{}",
      std::string(full, '='),
      std::string(static_cast<std::size_t>(bar) - full, ' '),
      tail);
}

}  // namespace flatshard
