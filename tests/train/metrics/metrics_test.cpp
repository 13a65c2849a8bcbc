#include "flatshard/train/metrics/metrics.h"

#include "flatshard/train/metrics/metrics_file.h"
#include "flatshard/train/metrics/number_text.h"
#include "flatshard/train/metrics/peak_flops.h"
#include "flatshard/train/metrics/status_line.h"
#include "flatshard/train/metrics/time_left.h"
#include "tests/support/message_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/diagnostics/norms.h"
#include "flatshard/diagnostics/step_profile.h"
#include "flatshard/train/metrics/host_operators.h"

namespace flatshard {
namespace {

using nlohmann::json;
using ::testing::EndsWith;
using ::testing::HasSubstr;

StepMetrics sample() {
  return {
      .step = 10,
      .steps = 1000,
      .loss = 9.94930,
      .grad_norm = 4.47171,
      .lr = 3e-4,
      .tokens = 81920,
      .step_ms = 1400.5,
      .data_ms = 0.25,
      .host_ms = 31,
      .exposed_comm_ms = 12.5,
      .tokens_per_s = 11699.2,
      .tokens_per_s_per_rank = 5849.6,
      .tflops_per_rank = 338.789,
      .mfu = 0.34256,
      .memory_allocated_bytes = 1,
      .memory_peak_bytes = 2,
      .memory_reserved_bytes = 53322020291,
      .memory_total_bytes = 101993152049};
}

class TempFile {
 public:
  TempFile()
      : path(
            std::filesystem::temp_directory_path() /
            fmt::format("flatshard-metrics-{}.jsonl", ::getpid())) {}
  ~TempFile() { std::filesystem::remove(path); }

  std::vector<json> rows() const {
    std::ifstream file(path);
    std::vector<json> all;
    for (std::string line; std::getline(file, line);) {
      all.push_back(json::parse(line));
    }
    return all;
  }

  const std::filesystem::path path;
};

TEST(FormatStep, IsTheLinePeopleGrep) {
  EXPECT_EQ(
      format_step(sample()),
      "step: 10/1000  loss: 9.9493  grad_norm: 4.4717  lr: 0.0003  memory: "
      "49.66GiB(52.28%)  tps: 11,699 (5,850/rank)  tflops: 338.79  mfu: "
      "34.26%");
}

TEST(FormatStep, KeepsItsFieldsWithoutAPeak) {
  EXPECT_EQ(
      format_step({.step = 1, .loss = std::nan("")}),
      "step: 1  loss: nan  grad_norm: 0.0000  lr: 0  memory: 0.00GiB(0.00%)  "
      "tps: 0  tflops: 0  mfu: N/A");
  EXPECT_THAT(
      format_step({.tflops_per_rank = 0.00123}),
      HasSubstr("tflops: 0.0012  "));
}

TEST(FormatStep, TheFirstStepHasTheTimesOfTheStart) {
  StepMetrics metrics = sample();
  metrics.start_times = StartTimes{
      .program_s = 0.94,
      .device_s = 0.4,
      .ranks_s = 0.31,
      .model_s = 0.5,
      .weights_s = 1.2,
      .step_s = 2.75};
  EXPECT_THAT(
      format_step(metrics),
      EndsWith("mfu: 34.26%  start: 6.1s (program 0.9, device 0.4, ranks 0.3, "
               "model 0.5, weights 1.2, step 2.8)"));
}

TEST(FormatStep, Validation) {
  EXPECT_EQ(
      format_validation({.step = 600, .loss = 1.83421}),
      "step: 600  validation_loss: 1.8342  perplexity: 6.2602");
  EXPECT_EQ(
      format_validation({.step = 600, .loss = 1.83421, .bits_per_byte = 2.65}),
      "step: 600  validation_loss: 1.8342  perplexity: 6.2602  bits_per_byte: "
      "2.6500");
}

TEST(Format, Flop) {
  EXPECT_EQ(format_flop(12), "12.00 FLOP");
  EXPECT_EQ(format_flop(345600), "345.60 KFLOP");
  EXPECT_EQ(format_flop(4.8e10), "48.00 GFLOP");
}

TEST(Format, Commas) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
  EXPECT_EQ(with_commas(-123), "-123");
}

TEST(Format, Counts) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1.00K");
  EXPECT_EQ(format_count(1234567), "1.23M");
  EXPECT_EQ(format_count(999999), "1.00M");
  EXPECT_EQ(format_count(4'500'000'000'000), "4.50T");
}

TEST(Format, Durations) {
  EXPECT_EQ(format_duration(-3), "0s");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(59.6), "1m00s");
  EXPECT_EQ(format_duration(185), "3m05s");
  EXPECT_EQ(format_duration(3725), "1h02m");
}

TEST(MetricsFile, WritesOneObjectALine) {
  const TempFile file;
  {
    MetricsFile metrics(file.path);
    metrics.write(sample());
    // On its way at once, not at the end.
    EXPECT_EQ(file.rows().size(), 1U);
    metrics.write_validation({.step = 20});
    metrics.write_validation({.step = 30, .bits_per_byte = 1.5});
  }
  auto rows = file.rows();
  ASSERT_EQ(rows.size(), 3U);
  // UTC, to the millisecond: texts sort like times.
  EXPECT_THAT(
      rows[0]["time"].get<std::string>(),
      ::testing::MatchesRegex("20..-..-..T..:..:..\\....Z"));
  EXPECT_LE(
      rows[0]["time"].get<std::string>(),
      rows[1]["time"].get<std::string>());
  rows[0].erase("time");
  rows[1].erase("time");
  EXPECT_EQ(rows[0], json::parse(R"({
        "step": 10, "attempt": 1, "tokens": 81920, "tokens_per_s": 11699.2,
        "loss": 9.9493, "grad_norm": 4.47171, "lr": 3e-4,
        "step_ms": 1400.5, "data_ms": 0.25, "host_ms": 31.0,
        "exposed_comm_ms": 12.5, "tokens_per_s_per_rank": 5849.6,
        "tflops_per_rank": 338.789, "mfu": 0.34256,
        "memory_allocated_bytes": 1, "memory_peak_bytes": 2,
        "memory_reserved_bytes": 53322020291,
        "memory_total_bytes": 101993152049})"));
  EXPECT_EQ(
      rows[1],
      json::parse(
          R"({"step": 20, "attempt": 1, "validation_loss": 0.0,
              "perplexity": 1.0})"));
  EXPECT_EQ(rows[2]["bits_per_byte"], 1.5);
}

TEST(MetricsFile, NotFiniteIsNullAndAText) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const TempFile file;
  MetricsFile metrics(file.path);
  metrics.write(
      {.step = 1,
       .loss = -std::nan(""),
       .grad_norm = -kInf,
       .experts = ExpertMetrics{.load = 2, .balance = kInf}});
  metrics.write_validation({.step = 1, .loss = 1000});
  metrics.write_norms(1, {{"a.b", std::nan(""), 0.5}});
  const auto rows = file.rows();  // throws where JSON is not strict
  EXPECT_TRUE(rows[0]["loss"].is_null());
  EXPECT_TRUE(rows[0]["experts"]["balance"].is_null());
  EXPECT_EQ(rows[0]["experts"]["load"], 2);
  EXPECT_EQ(
      rows[0]["not_finite"],
      json::parse(R"({"loss": "nan", "grad_norm": "-inf",
                      "experts": {"balance": "inf"}})"));
  // Not known is null as well, and has no text.
  EXPECT_TRUE(rows[0]["mfu"].is_null());
  EXPECT_EQ(rows[1]["not_finite"], json::parse(R"({"perplexity": "inf"})"));
  EXPECT_EQ(
      rows[2]["not_finite"],
      json::parse(R"({"weight_norms": {"a.b": "nan"}})"));
}

TEST(MetricsFile, NamesThatAreNotUtf8AreMadeSo) {
  const TempFile file;
  MetricsFile(file.path).write_validation(
      {.step = 1, .loss = 1, .parts = {{"corpus-\xff", 2}, {"a\nb", 3}}});
  const auto rows = file.rows();
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0]["validation_losses"]["corpus-\xef\xbf\xbd"], 2);
  EXPECT_EQ(rows[0]["validation_losses"]["a\nb"], 3);
}

TEST(MetricsFile, StartsCheckpointsAndProfilesAreRows) {
  const TempFile file;
  MetricsFile metrics(file.path);
  metrics.write_start(
      {.done = 5,
       .steps = 9,
       .ranks = 2,
       .device = "CPU",
       .parameters = 100,
       .tokens_per_step = 64,
       .environment = {{"torch", "2.11.0"}}});
  metrics.write_checkpoint(6, 1.5);
  metrics.write_checkpoint_error(7, "no space");
  metrics.write_weights(7, 0.5, 4096);
  metrics.write_weights_error(8, "refused", 2);
  metrics.write_nonfinite(8, "a gradient", std::nullopt);
  metrics.write_nonfinite(9, "a gradient", 6);
  metrics.write_profile(
      9,
      StepProfile{
          .span_ms = 10,
          .compute_ms = 7,
          .exposed_ms = 2,
          .idle_ms = 1,
          .classes = {{.name = "GEMM", .ms = 6}}});
  std::vector<HostOperator> operators(14);
  for (std::size_t i = 0; i < operators.size(); ++i) {
    operators[i] = {.name = "op" + std::to_string(i), .own_ns = 1'000'000};
  }
  metrics.write_profile(9, operators);
  auto rows = file.rows();
  for (json& row : rows) {
    EXPECT_EQ(row["attempt"], 1);
    row.erase("time");
    row.erase("attempt");
  }
  EXPECT_EQ(rows[0], json::parse(R"({"step": 5, "start": {
        "steps": 9, "ranks": 2, "device": "CPU", "parameters": 100,
        "tokens_per_step": 64, "environment": {"torch": "2.11.0"},
        "data": [], "changed_keys": []}})"));
  EXPECT_EQ(rows[1], json::parse(R"({"step": 6, "checkpoint_s": 1.5})"));
  EXPECT_EQ(
      rows[2],
      json::parse(R"({"step": 7, "checkpoint_error": "no space"})"));
  EXPECT_EQ(
      rows[3],
      json::parse(R"({"step": 7, "weights_s": 0.5, "weights_nbytes": 4096})"));
  EXPECT_EQ(rows[4], json::parse(R"({
        "step": 8, "weights_error": "refused", "weights_failures": 2})"));
  EXPECT_EQ(rows[5], json::parse(R"({"step": 8, "nonfinite": "a gradient"})"));
  EXPECT_EQ(rows[6]["goes_on_after"], 6);
  EXPECT_EQ(rows[7]["profile"], json::parse(R"({
        "span_ms": 10.0, "compute_ms": 7.0, "exposed_ms": 2.0, "idle_ms": 1.0,
        "classes_ms": {"GEMM": 6.0}})"));
  EXPECT_EQ(rows[8]["profile"]["operators_ms"]["op11"], 1.0);
  EXPECT_EQ(rows[8]["profile"]["operators_ms"]["other"], 2.0);
  EXPECT_EQ(rows[8]["profile"]["operators_ms"].size(), 13U);
}

TEST(MetricsFile, TruncatesOrAppends) {
  const TempFile file;
  MetricsFile(file.path).write_validation({.step = 1, .loss = 1});
  MetricsFile(file.path, MetricsFile::Mode::append)
      .write_validation({.step = 2, .loss = 1});
  EXPECT_EQ(file.rows().size(), 2U);
  MetricsFile(file.path).write_validation({.step = 3, .loss = 1});
  EXPECT_EQ(file.rows().size(), 1U);
}

TEST(MetricsFile, RowsThatAreTrainedAgainAreMarked) {
  const TempFile file;
  {
    MetricsFile metrics(file.path);
    for (const int step : {1, 2, 3, 4}) {
      metrics.write_validation({.step = step, .loss = 1.0 * step});
    }
    metrics.write_ended(4);
  }
  EXPECT_TRUE(metrics_say_ended(file.path, 4));
  EXPECT_FALSE(metrics_say_ended(file.path, 3));
  {
    // A machine that lost its power leaves such a line.
    std::ofstream(file.path, std::ios::app) << R"({"step": 5, "lo)";
    MetricsFile metrics(file.path, MetricsFile::Mode::append);
    EXPECT_EQ(metrics.attempt(), 2);
    metrics.mark_overtaken(2);
    metrics.write_validation({.step = 3, .loss = 30});
    metrics.mark_overtaken(2);  // of a rewind: its own row as well
    metrics.write_validation({.step = 3, .loss = 300});
  }
  EXPECT_EQ(MetricsFile(file.path, MetricsFile::Mode::append).attempt(), 3);
  EXPECT_FALSE(metrics_say_ended(file.path, 4));
  EXPECT_FALSE(metrics_say_ended("/none", 4));
  std::string curve;
  for (const json& row : file.rows()) {
    curve += fmt::format(
        "{}{}{} ",
        row["step"].get<int>(),
        row["attempt"] == 1 ? "a" : "b",
        row.value("overtaken", false) ? "-" : "");
  }
  EXPECT_EQ(curve, "1a 2a 3a- 4a- 4a- 3b- 3b ");
}

TEST(MetricsFile, ErrorsNameTheFile) {
  try {
    MetricsFile("/none/metrics.jsonl");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_THAT(
        error.message(),
        HasSubstr("cannot write /none/metrics.jsonl: No such"));
  }
  if (std::filesystem::exists("/dev/full")) {
    MetricsFile full("/dev/full");
    EXPECT_THROW(full.write_validation({.step = 1, .loss = 1}), Error);
  }
}

TEST(MetricsFile, ALineThatDoesNotFitIsTakenBack) {
  const TempFile file;
  MetricsFile metrics(file.path);
  metrics.write(sample());
  const auto whole = std::filesystem::file_size(file.path);
  // The disk is full in the middle of the next line.
  struct rlimit old {};
  ::getrlimit(RLIMIT_FSIZE, &old);
  struct rlimit low = old;
  low.rlim_cur = whole + 100;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &low);
  EXPECT_THROW(metrics.write(sample()), Error);
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(std::filesystem::file_size(file.path), whole);
  metrics.write(sample());
  EXPECT_EQ(file.rows().size(), 2U);
}

TEST(MetricsFile, NormsAreARow) {
  const TempFile file;
  MetricsFile(file.path).write_norms(
      3,
      {{"b", 2.0, 0.5}, {"a", 1.0, std::nullopt}});
  json row = file.rows()[0];
  row.erase("time");
  EXPECT_EQ(
      row,
      json::parse(
          R"({"step": 3, "attempt": 1, "weight_norms": {"b": 2.0, "a": 1.0},
                      "grad_norms": {"b": 0.5}})"));
}

TEST(StatusLine, DrawsProgressTokensAndTimeLeft) {
  const Progress progress{
      .done = 150,
      .total = 600,
      .loss = 2.5,
      .tokens = 1228800,
      .elapsed_s = 30};
  EXPECT_EQ(
      StatusLine::render(progress, 80),
      "[======" + std::string(18, ' ') +
          "]  25%  150/600  loss 2.5000  1.23M tokens  1m30s left");
  EXPECT_EQ(
      StatusLine::render(
          {.done = 600, .total = 600, .loss = 1.8, .elapsed_s = 120},
          50),
      "[===========] 100%  600/600  loss 1.8000  0s left");
}

TEST(StatusLine, ALossThatIsNotKnownIsNotShown) {
  EXPECT_EQ(
      StatusLine::render({.done = 0, .total = 600}, 50),
      "[" + std::string(35, ' ') + "]   0%  0/600");
}

TEST(StatusLine, AResumedRunCountsItsOwnSteps) {
  // 10 steps in 10 s, 90 to go.
  EXPECT_THAT(
      StatusLine::render(
          {.done = 910, .total = 1000, .first = 900, .elapsed_s = 10},
          200),
      HasSubstr("1m30s left"));
}

TEST(StatusLine, ComparesTheSpeedWithThePlan) {
  // 10 steps in 10 s, where the plan has 0.9 s a step.
  EXPECT_THAT(
      StatusLine::render(
          {.done = 910,
           .total = 1000,
           .first = 900,
           .loss = 1,
           .elapsed_s = 10,
           .planned_step_s = 0.9},
          200),
      HasSubstr("loss 1.0000  90% of plan  1m30s left"));
}

TEST(TimeLeft, IsALineOnceAMinute) {
  TimeLeft left;
  const auto line = [&](std::int64_t done, double elapsed_s) {
    return left.line(
        {.done = done, .total = 2000, .first = 900, .elapsed_s = elapsed_s});
  };
  EXPECT_EQ(line(900, 0), "");
  EXPECT_EQ(line(930, 59), "");
  EXPECT_EQ(line(1000, 100), "step 1,000 of 2,000 (50%), 16m40s left");
  EXPECT_EQ(line(1050, 159), "");
  EXPECT_EQ(line(1100, 160), "step 1,100 of 2,000 (55%), 12m00s left");
  // No line for a run without time left.
  EXPECT_EQ(line(2000, 1000), "");
}

TEST(StatusLine, FitsNarrowTerminals) {
  for (int width = 1; width < 120; ++width) {
    EXPECT_LT(
        StatusLine::render(
            {.done = 150,
             .total = 600,
             .loss = 2.5,
             .tokens = 1000000,
             .elapsed_s = 30},
            width)
            .size(),
        static_cast<std::size_t>(std::max(width, 2)));
  }
}

TEST(StatusLine, IsSilentWithoutATerminal) {
  std::FILE* file = std::tmpfile();
  {
    StatusLine status(file);
    EXPECT_FALSE(status.enabled());
    status.update({.done = 1, .total = 2});
  }
  EXPECT_EQ(std::ftell(file), 0);
  std::fclose(file);
}

TEST(PeakFlops, IsThatOfTheDevice) {
  const auto peak = [](const char* name) {
    return dense_bf16_flops(name).value_or(0) * 1e-12;
  };
  EXPECT_EQ(peak("NVIDIA A100-SXM4-80GB"), 312);
  EXPECT_EQ(peak("NVIDIA A100 80GB PCIe"), 312);
  EXPECT_EQ(peak("NVIDIA H100 80GB HBM3"), 989);
  EXPECT_EQ(peak("NVIDIA H100 PCIe"), 756);
  EXPECT_EQ(peak("NVIDIA H100 NVL"), 835);
  EXPECT_EQ(peak("NVIDIA H200"), 989);
  EXPECT_EQ(peak("NVIDIA H200 NVL"), 835);
  EXPECT_EQ(peak("NVIDIA H20"), 148);
  EXPECT_EQ(peak("NVIDIA H20-3e"), 148);
  EXPECT_EQ(peak("NVIDIA L40S"), 362);
  EXPECT_EQ(peak("NVIDIA B200"), 2250);
  EXPECT_EQ(peak("NVIDIA GeForce RTX 4090"), 165.2);
  EXPECT_EQ(peak("NVIDIA GeForce RTX 5090"), 209.5);
  for (const char* unknown :
       {"NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA L40",
        "NVIDIA A10",
        "NVIDIA RTX PRO 6000",
        ""}) {
    EXPECT_FALSE(dense_bf16_flops(unknown)) << unknown;
  }
}

}  // namespace
}  // namespace flatshard
