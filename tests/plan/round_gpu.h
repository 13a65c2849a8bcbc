#pragma once

#include "flatshard/plan/gpu.h"

namespace flatshard::plan {

/// Returns rates that one computes with in the head: 1 TFLOP/s, 1 GB/s, no
/// latencies.
inline Gpu round_gpu() {
  Gpu gpu{.name = "round", .source = "a test", .memory_gib = 1};
  gpu.peak_bf16_tflops = 2;
  const ProductRates one{.m = {1}, .n = {1}, .k = {1}, .tflops = {1}};
  gpu.products.fill(one);
  gpu.grouped.fill(one);
  gpu.float8["rowwise"] = {.m = {1}, .n = {1}, .k = {1}, .tflops = {2}};
  const Curve flat{.sizes = {1}, .rates = {1}};
  gpu.attention[128] = {.forward = flat, .backward = flat};
  for (const std::string_view kind : kPasses) {
    gpu.passes[std::string(kind)] = 1;
  }
  gpu.nvlink = {
      .all_gather = flat,
      .reduce_scatter = flat,
      .all_reduce = flat,
      .all_to_all = flat,
      .copies = flat,
      .copied_reductions = flat};
  gpu.network_gb_s = 0.5;
  gpu.host_gb_s = 1;
  return gpu;
}

}  // namespace flatshard::plan
