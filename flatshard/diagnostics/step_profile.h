#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flatshard {

/// One kernel, copy or fill on a GPU.
struct KernelInterval {
  std::string name;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t stream = 0;
};

/// The time of all kernels of one kind; kernels that overlap count twice.
struct KernelClass {
  std::string name;  ///< "GEMM", "attention", "all-gather", ...
  double ms = 0;
  std::int64_t kernels = 0;
};

/// Time breakdown of one step on one GPU.
struct StepProfile {
  double span_ms = 0;     ///< first kernel's start to last kernel's end
  double compute_ms = 0;  ///< a kernel that computes runs
  double exposed_ms = 0;  ///< only communication runs
  double idle_ms = 0;     ///< nothing runs
  std::vector<KernelClass> classes;  ///< largest first
  /// The purpose of a stream ("compute", "gather", "reduce"), by its number.
  std::map<std::int64_t, std::string> streams;
};

/// Returns the class of a kernel, "other" for one without a class.
std::string kernel_class(const std::string& kernel_name);

StepProfile profile_step(const std::vector<KernelInterval>& kernels);

/// The GPU's peak rates, and the amount of work.
struct SpeedOfLight {
  double peak_flops = 0;  ///< per second; 0: unknown
  /// Floating-point operations of the step by class, e.g. "GEMM".
  std::map<std::string, double> flops;
};

/// Returns a table with one line per class, and below it the lines of the span.
std::string to_string(const StepProfile& profile, const SpeedOfLight& light);

}  // namespace flatshard
