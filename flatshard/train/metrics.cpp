#include "flatshard/train/metrics.h"

#include "flatshard/unit/graph_options.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
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
  const auto all = std::llround(metrics.tokens_per_s);
  const auto each = std::llround(metrics.tokens_per_s_per_rank);
  // A small model on a CPU has thousandths of a TFLOP/s.
  constexpr double kTwoDigitsShow = 0.1;
  return fmt::format(
      "step: {}{}  loss: {:.4f}  grad_norm: {:.4f}  lr: {:.3g}  memory: "
      "{:.2f}GiB({:.2f}%)  tps: {}{}  tflops: {}  mfu: {}",
      metrics.step,
      metrics.steps > 0 ? fmt::format("/{}", metrics.steps) : "",
      metrics.loss,
      metrics.grad_norm,
      metrics.lr,
      static_cast<double>(metrics.memory_reserved_bytes) / kGiB,
      share,
      with_commas(all),
      all == each ? "" : fmt::format(" ({}/rank)", with_commas(each)),
      metrics.tflops_per_rank < kTwoDigitsShow
          ? fmt::format("{:.2g}", metrics.tflops_per_rank)
          : fmt::format("{:.2f}", metrics.tflops_per_rank),
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

std::string format_flop(double flop) {
  constexpr std::array<const char*, 6> kUnits =
      {"FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"};
  std::size_t unit = 0;
  while (flop >= 1000 && unit + 1 < kUnits.size()) {
    flop /= 1000;
    ++unit;
  }
  return fmt::format("{:.2f} {}", flop, kUnits.at(unit));
}

namespace {

/// Calls `see` with each line of a file and the object that it holds.
void for_each_row(
    const std::filesystem::path& path,
    const std::function<void(const std::string&, const nlohmann::json&)>& see) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    see(line, nlohmann::json::parse(line, nullptr, false));
  }
}

std::int64_t number_of(const nlohmann::json& row, const char* key) {
  return row.is_object() && row.contains(key) && row[key].is_number_integer()
             ? row[key].get<std::int64_t>()
             : -1;
}

std::string utc_ms() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                      now.time_since_epoch())
                      .count() %
                  1000;
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  return fmt::format("{}.{:03}Z", text.data(), ms);
}

/// What every row begins with.
nlohmann::ordered_json begin_row(std::int64_t step, int attempt) {
  nlohmann::ordered_json row;
  row["step"] = step;
  row["time"] = utc_ms();
  row["attempt"] = attempt;
  return row;
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& path, Mode mode)
    : path_(path) {
  if (mode == Mode::append) {
    std::int64_t last = 0;
    for_each_row(path, [&](const std::string&, const nlohmann::json& row) {
      last = std::max({last, number_of(row, "attempt"), std::int64_t{0}});
    });
    attempt_ = static_cast<int>(last) + 1;
  }
  open(mode == Mode::append ? 0 : O_TRUNC);
}

MetricsFile::~MetricsFile() {
  ::close(fd_);
}

void MetricsFile::open(int flags) {
  if (fd_ >= 0) {
    ::close(fd_);
  }
  fd_ = ::open(
      path_.c_str(),
      O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND | flags,
      0644);
  FLATSHARD_CHECK(
      fd_ >= 0,
      io,
      "cannot write {}: {}",
      path_.string(),
      std::strerror(errno));
}

void MetricsFile::mark_overtaken(std::int64_t step) {
  std::string text;
  bool changed = false;
  for_each_row(path_, [&](const std::string& line, const nlohmann::json& row) {
    if (row.is_discarded()) {
      changed = true;  // half a line, of a machine that lost its power
      return;
    }
    const bool marks = number_of(row, "step") > step &&
                       !row.contains("overtaken") && line.ends_with('}');
    text +=
        marks ? line.substr(0, line.size() - 1) + ",\"overtaken\":true}" : line;
    text += '\n';
    changed = changed || marks;
  });
  if (changed) {
    write_file_atomic(path_, text);
    open(0);
  }
}

bool metrics_say_ended(const std::filesystem::path& path, std::int64_t step) {
  bool ended = false;
  for_each_row(path, [&](const std::string&, const nlohmann::json& row) {
    ended = ended || (number_of(row, "step") == step && row.contains("ended") &&
                      !row.contains("overtaken"));
  });
  return ended;
}

void MetricsFile::write_ended(std::int64_t step) {
  auto row = begin_row(step, attempt_);
  row["ended"] = true;
  write_line(row.dump());
}

void MetricsFile::write_graphs(std::int64_t step, const GraphStats& stats) {
  auto row = begin_row(step, attempt_);
  auto& graphs = row["cuda_graph"];
  graphs["captures"] = stats.captures;
  graphs["forward_replays"] = stats.forward_replays;
  graphs["backward_replays"] = stats.backward_replays;
  graphs["nbytes"] = stats.nbytes;
  graphs["fallbacks"] = stats.fallbacks;
  write_line(row.dump());
}

void MetricsFile::write(const StepMetrics& metrics) {
  auto row = begin_row(metrics.step, attempt_);
  row["loss"] = metrics.loss;
  row["grad_norm"] = metrics.grad_norm;
  row["lr"] = metrics.lr;
  row["step_ms"] = metrics.step_ms;
  row["data_ms"] = metrics.data_ms;
  row["host_ms"] = metrics.host_ms;
  row["exposed_comm_ms"] = metrics.exposed_comm_ms;
  row["tokens_per_s"] = metrics.tokens_per_s;
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
  auto row = begin_row(metrics.step, attempt_);
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
  auto row = begin_row(step, attempt_);
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
  auto row = begin_row(step, attempt_);
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

void refuse_foreign_checkpoints(const std::filesystem::path& checkpoints) {
  FLATSHARD_CHECK(
      checkpoints.is_relative() || list_checkpoints(checkpoints).empty(),
      config,
      "checkpoint.folder = {} holds the checkpoints of another run; go on from "
      "them with --resume, or choose another folder",
      checkpoints.string());
}

std::filesystem::path keep_earlier_run(
    const std::filesystem::path& output_dir,
    const std::filesystem::path& checkpoints) {
  namespace fs = std::filesystem;
  refuse_foreign_checkpoints(checkpoints);
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
