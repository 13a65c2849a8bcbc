#include "flatshard/train/metrics/metrics_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "flatshard/core/error.h"
#include "flatshard/core/file_writer.h"
#include "flatshard/core/log.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/runtime/graph_options.h"

namespace flatshard {
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
      0666);
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
  graphs["step_replays"] = stats.step_replays;
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
  if (metrics.experts) {
    auto& experts = row["experts"];
    experts["load"] = metrics.experts->load;
    experts["dropped"] = metrics.experts->dropped;
    experts["balance"] = metrics.experts->balance;
    if (metrics.experts->exchange_ms) {
      experts["exposed_exchange_ms"] = *metrics.experts->exchange_ms;
    }
    if (metrics.experts->bias) {
      experts["bias"] = *metrics.experts->bias;
    }
  }
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

}  // namespace flatshard
