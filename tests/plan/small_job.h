#pragma once

#include "flatshard/plan/job.h"

#include <string>

namespace flatshard::plan {

/// AdamW reads and writes float32 weights and two states of an element, reads a
/// gradient of two bytes, and writes a weight of two.
inline constexpr std::int64_t kAdamWNbytes = 2 * 4 + 2 * 8 + 2 + 2;

/// Returns layers of equal units between an embedding and a head without
/// parameters, on the ranks of one host, ZeRO-3. A unit has 1000 * ranks
/// numbers of two bytes.
inline Job small_job(int layers, std::int64_t ranks) {
  Job job{.ranks = ranks, .ranks_per_host = ranks, .clips = false};
  const auto unit = [](const std::string& name) {
    return UnitShape{.name = name, .parent = 0};
  };
  job.units.push_back({.name = "root"});
  job.units.push_back(unit("embed"));
  for (int layer = 0; layer < layers; ++layer) {
    UnitShape shape = unit("layer" + std::to_string(layer));
    shape.groups.push_back(
        {.tensors = {{"w", {1000 * ranks}, Granularity::element(1)}},
         .alignment = 1,
         .strategy = Strategy::named("zero3", 1),
         .mesh = {.sizes = {ranks}, .strides = {1}, .model_ranks = ranks},
         .sizes = {.main = 4, .compute = 2, .reduce = 2, .gradient = 2}});
    job.plan_units.layers.push_back(static_cast<UnitId>(job.units.size()));
    job.plan_units.layer_grads.push_back({.attend = 1});
    job.kind_of_layer.push_back(0);
    job.overlap.dense.push_back(true);
    job.units.push_back(shape);
  }
  job.units.push_back(unit("head"));
  job.plan_units.ends = PlanUnits::Ends{
      .embed = 1,
      .head = static_cast<UnitId>(job.units.size() - 1)};
  job.updates.resize(job.units.size());
  for (const UnitId unit : job.plan_units.layers) {
    job.state_nbytes += 8 * 1000;
    job.updates[unit] = {Kernel::memory("optimizer", kAdamWNbytes * 1000)};
  }
  job.overlap.in_flight = 1;
  job.layer_kinds.emplace_back();
  job.tokens_per_rank = 100;
  job.flops_per_token = 1e9;
  job.causal_flops_per_token = 5e8;
  return job;
}

}  // namespace flatshard::plan
