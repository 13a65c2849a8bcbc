#pragma once

#include "flatshard/mesh/mesh.h"
#include "flatshard/plan/gpu.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace flatshard {

/// Duration and sizes of the measurements of `calibrate`.
struct CalibrateOptions {
  /// Sizes of the grid of matmuls, on each of the three axes.
  std::vector<std::int64_t> products;
  std::vector<std::int64_t> float8;      ///< likewise, for FP8 matmuls
  std::vector<std::int64_t> group_rows;  ///< rows per expert
  std::vector<std::int64_t> group_dims;  ///< dimensions of an expert's weights
  std::vector<std::int64_t> seq_lens;
  std::int64_t tokens = 0;       ///< for passes and attention
  std::int64_t link_nbytes = 0;  ///< the largest buffer of a collective
  double seconds_per_point = 0;  ///< at least so long, after a warm-up

  /// Returns the options for GPUs; a minute in all.
  static CalibrateOptions for_gpus();
  /// Returns the options for a CPU, where figures only try the program out.
  static CalibrateOptions for_cpus();
};

class CallTimer;

/// Measures the rates of this rank's device, and with several ranks the rates
/// of the links between them. Unmeasured rates (the network) stay 0.
/// Collective.
/// @param report  called with the next measurement, on every rank.
plan::Gpu calibrate(
    Mesh& mesh,
    const CalibrateOptions& options,
    const std::function<void(const std::string&)>& report);

// The parts of it.
void calibrate_products(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu);
void calibrate_float8(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu);
void calibrate_attention(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu);
void calibrate_passes(
    const CallTimer& timer,
    const CalibrateOptions& options,
    plan::Gpu& gpu);
void calibrate_host(at::Device device, plan::Gpu& gpu);
/// Measures copies between each GPU and its host, of all ranks at once and both
/// ways at once. Collective.
void calibrate_host_copies(
    Mesh& mesh,
    const CalibrateOptions& options,
    plan::Gpu& gpu);
/// Collective.
void calibrate_links(
    Mesh& mesh,
    const CalibrateOptions& options,
    plan::Gpu& gpu);

}  // namespace flatshard
