#include "flatshard/diagnostics/memory_table.h"
#include "flatshard/diagnostics/poison.h"
#include "flatshard/graphs/model_graphs.h"

#include <fmt/format.h>

#include <c10/core/ScalarType.h>

namespace flatshard {
namespace {

std::string human(std::int64_t nbytes) {
  constexpr double kMiB = 1 << 20;
  const double mib = static_cast<double>(nbytes) / kMiB;
  return mib < 1024 ? fmt::format("{:.1f} MiB", mib)
                    : fmt::format("{:.2f} GiB", mib / 1024);
}

}  // namespace

std::vector<MemoryRow> memory_rows(
    const Runtime& runtime,
    std::int64_t optimizer_nbytes,
    const std::optional<GraphStats>& graphs) {
  WeightPlanes::Bytes weights;
  GradientPipeline::Bytes waiting;
  std::int64_t grads = 0;
  std::int64_t fp8 = 0;           // of weights.compute
  std::int64_t post_forward = 0;  // of the slot pool
  std::string strategy = "-";
  Precision precision;
  at::ScalarType grads_dtype = precision.main_grads;
  for (const auto& unit : runtime.units()) {
    post_forward += unit->weights().post_forward_nbytes();
    for (const auto& group : unit->groups()) {
      const WeightPlanes::Bytes planes = group->weights().nbytes();
      weights.main += planes.main;
      weights.compute += planes.compute;
      fp8 += group->options().float8 ? planes.compute : 0;
      const GradientPipeline::Bytes gradients = group->gradients().nbytes();
      waiting.inner += gradients.inner;
      waiting.local += gradients.local;
      strategy = group->strategy().name;
      precision = group->options().precision;
      if (group->trainable()) {
        grads_dtype = group->options().grads_in_reduce_dtype
                          ? precision.reduce
                          : precision.main_grads;
        grads += group->weights().main().local().numel() *
                 static_cast<std::int64_t>(c10::elementSize(grads_dtype));
      }
    }
  }
  const SlotPlan& plan = runtime.executor().slots().places();
  std::vector<MemoryRow> rows{
      {"main weights",
       weights.main,
       fmt::format(
           "{}, the optimizer's shard",
           c10::toString(precision.main_params))},
      {"compute weights",
       weights.compute,
       fmt::format(
           "{}{}, all-gathered ({})",
           c10::toString(precision.compute),
           fp8 > 0 ? fmt::format(", except {} of FP8", human(fp8)) : "",
           strategy)},
      {"gradients",
       grads,
       fmt::format(
           "{}, reduced, from backward to zero_grad",
           c10::toString(grads_dtype))},
      {"optimizer state", optimizer_nbytes, "of the main weights' shard"},
      {"slot pool",
       runtime.executor().slots().pool().arena_nbytes(),
       fmt::format(
           "communication buffers for {} all-gathers and reductions; peak "
           "usage {}{}",
           plan.num_keys(),
           human(plan.peak_nbytes()),
           post_forward > 0 ? fmt::format(
                                  "; {} are shards from forward to backward",
                                  human(post_forward))
                            : "")}};
  if (runtime.mesh()->communicator_nbytes() > 0) {
    rows.push_back(
        {"copied gradients",
         runtime.mesh()->communicator_nbytes(),
         "what peers write for this rank to sum"});
  }
  if (const std::int64_t nbytes =
          (graphs ? *graphs : runtime.graphs().stats()).nbytes;
      nbytes > 0) {
    rows.push_back(
        {"CUDA graphs",
         nbytes,
         "what recorded regions or steps save, give out and use in between; in "
         "place of activations"});
  }
  if (const std::int64_t nbytes = Poison::nbytes(runtime); nbytes > 0) {
    rows.push_back(
        {"poison",
         nbytes,
         "NaN that resharded parameters point to (diagnostics.poison)"});
  }
  if (waiting.inner > 0) {
    rows.push_back({"inner gradients", waiting.inner, "before the outer axes"});
  }
  if (waiting.local > 0) {
    rows.push_back({"local gradients", waiting.local, "not yet reduced"});
  }
  return rows;
}

std::int64_t total_nbytes(const std::vector<MemoryRow>& rows) {
  std::int64_t sum = 0;
  for (const MemoryRow& row : rows) {
    sum += row.nbytes;
  }
  return sum;
}

std::string to_string(
    const std::vector<MemoryRow>& rows,
    const std::vector<MemoryRow>& host_rows) {
  std::string text = "memory of one rank, without activations\n";
  const auto append = [&](const MemoryRow& row) {
    text += fmt::format(
        "  {:<16} {:>12}  {}\n",
        row.role,
        human(row.nbytes),
        row.reason);
  };
  for (const MemoryRow& row : rows) {
    append(row);
  }
  text += fmt::format("  {:<16} {:>12}\n", "sum", human(total_nbytes(rows)));
  if (!host_rows.empty()) {
    text += "on the host\n";
    for (const MemoryRow& row : host_rows) {
      append(row);
    }
  }
  text.pop_back();
  return text;
}

}  // namespace flatshard
