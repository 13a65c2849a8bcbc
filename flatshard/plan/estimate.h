#pragma once

#include "flatshard/plan/step.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flatshard::plan {

/// The largest part of a step, or the obstacle to a run.
enum class Bound {
  memory,            ///< the job does not fit
  compute,           ///< matmuls and attention
  memory_bandwidth,  ///< passes over memory
  transfers,         ///< compute waits for all-gathers, reductions, exchanges
  host,              ///< launches
};
std::string_view to_string(Bound bound);

/// Results for a Job on a Gpu: bytes, time, and derived figures.
struct Estimate {
  std::vector<RoleBytes> memory;  ///< the memory table at the start
  std::int64_t peak_nbytes = 0;   ///< with activations, at most
  std::int64_t room_nbytes = 0;   ///< memory of the GPU, less a reserve
  StepPlan step;
  double tokens_per_second = 0;  ///< per GPU
  double tflops = 0;             ///< per GPU, by the full convention
  double mfu = 0;                ///< same definition as in the trainer
  double causal_mfu = 0;         ///< attention counted as causal
  Bound bound = Bound::compute;

  bool fits() const { return peak_nbytes <= room_nbytes; }
};

/// Fraction of a GPU's memory that a plan leaves to the driver, NCCL, cuBLAS
/// and allocator fragmentation.
inline constexpr double kReserve = 0.05;

/// Prices a job on a GPU.
Estimate estimate(const Job& job, const Gpu& gpu);

/// Prices a job as `estimate`. A job whose memory table already does not fit is
/// not priced: its peak is the sum of that table.
Estimate estimate_if_table_fits(const Job& job, const Gpu& gpu);

/// Returns the GPU-hours for a number of tokens.
double gpu_hours(const Estimate& estimate, double tokens);

/// Returns the days for this many GPU-hours on all ranks of a job.
double days_of(const Job& job, double gpu_hours);

/// Returns "512", "1.5B" or "15T" as a number. @throws Error{config} for other
/// texts.
double parse_tokens(std::string_view text);

/// Returns a number of tokens as parse_tokens reads it: 1.5e13 is "15T".
std::string tokens_text(double tokens);

}  // namespace flatshard::plan
