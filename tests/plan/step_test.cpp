#include "flatshard/plan/step.h"

#include "flatshard/plan/unit_prices.h"
#include "flatshard/schedule/simulate.h"
#include "tests/plan/round_gpu.h"
#include "tests/plan/small_job.h"

#include <gtest/gtest.h>

#include <map>

namespace flatshard::plan {
namespace {

constexpr double kGb = 1e9;

/// Forwards and backwards of these numbers of seconds each on round_gpu().
Job timed_job(int layers, std::int64_t ranks, double forward, double backward) {
  Job job = small_job(layers, ranks);
  NodeWork& node = job.layer_kinds[0].nodes[PlanNode::attend];
  node.forward.push_back(Kernel::memory("norm", forward * kGb));
  node.backward.push_back(Kernel::memory("norm", backward * kGb));
  return job;
}

StepPlan step_of(const Job& job, const Gpu& gpu = round_gpu()) {
  return plan_step(job, plan_units(job), gpu);
}

/// Returns a GPU with a time of `gather` seconds for a unit's all-gather, and
/// of `reduce` seconds for its reduction.
Gpu with_links(double ranks, double gather, double reduce) {
  Gpu gpu = round_gpu();
  const double moved = 2 * 1000 * (ranks - 1);
  gpu.nvlink.all_gather.rates = {moved / gather / kGb};
  gpu.nvlink.reduce_scatter.rates = {moved / reduce / kGb};
  gpu.passes["optimizer"] = 1e9;  // next to nothing
  gpu.passes["sum"] = 1e9;
  return gpu;
}

TEST(StepPlan, OneRankIsItsCompute) {
  const Job job = timed_job(3, 1, 1, 2);
  const StepPlan step = step_of(job);
  // 3 forwards and backwards; the optimizer reads and writes 12 + 12 + 2 + 2
  // bytes of each of 1000 numbers.
  constexpr double kOptimizer = 3 * 1000 * kAdamWNbytes / 1e9;
  EXPECT_NEAR(step.device_seconds, 9 + kOptimizer, 1e-4);
  EXPECT_NEAR(step.kinds.at("norm"), 9, 1e-9);
  EXPECT_NEAR(step.kinds.at("optimizer"), kOptimizer, 1e-12);
  EXPECT_NEAR(step.exposed_seconds, 0, 1e-4);
}

// All-gathers run one unit ahead, so an all-gather shorter than a forward is
// hidden. The first all-gather, the backward's first one and the last reduction
// are exposed: there is nothing to overlap them with. The optimizer and the
// head run in parallel with the two all-gathers, in no time here.
TEST(StepPlan, HidesTransfersThatAreShorterThanCompute) {
  const Job job = timed_job(4, 4, 1, 2);
  const StepPlan step = step_of(job, with_links(4, 0.5, 0.5));
  EXPECT_NEAR(step.compute_seconds, 4 * 3, 1e-3);
  EXPECT_NEAR(step.exposed_seconds, 3 * 0.5, 1e-3);
  EXPECT_NEAR(step.device_seconds, 13.5, 1e-3);
}

// All-gathers of 3 s are as long as the forward. In backward, 3 of the 4 units
// are all-gathered again, each in parallel with an earlier reduction.
TEST(StepPlan, FollowsTheLinkWhereThatIsSlower) {
  const Job job = timed_job(4, 4, 1, 2);
  const StepPlan fast = step_of(job, with_links(4, 0.5, 0.5));
  const StepPlan slow = step_of(job, with_links(4, 3, 0.5));
  // The forward: one all-gather after the other, then the last forward.
  EXPECT_GT(slow.device_seconds, 4 * 3 + 1 + 3 * 3);
  EXPECT_GT(slow.device_seconds, fast.device_seconds);
  EXPECT_NEAR(slow.compute_seconds, fast.compute_seconds, 1e-3);
}

TEST(StepPlan, ContentionMakesComputeLonger) {
  const Job job = timed_job(4, 4, 1, 2);
  Gpu gpu = with_links(4, 0.5, 0.5);
  const double before = step_of(job, gpu).device_seconds;
  gpu.contention.collectives = 1.5;
  EXPECT_GT(step_of(job, gpu).device_seconds, before + 1);
}

// Rates inside a host are slower in parallel with compute, the network is not.
TEST(StepPlan, ComputeSlowsTheLinksInsideAHost) {
  Job job = timed_job(4, 4, 1, 2);
  Gpu gpu = with_links(4, 0.9, 0.5);
  gpu.network_gb_s = 1;  // far more than what a host has
  const double before = step_of(job, gpu).device_seconds;
  gpu.contention.slowed_collectives = 2;
  EXPECT_GT(step_of(job, gpu).device_seconds, before + 1);
  job.ranks_per_host = 1;
  const double between = step_of(job, gpu).device_seconds;
  gpu.contention.slowed_collectives = 1;
  EXPECT_EQ(step_of(job, gpu).device_seconds, between);
}

// A reduction by copies of 0.9 s, of which a kernel that sums takes 0.5 s.
TEST(StepPlan, SumsOfCopiedReductionsShareTheGpuWithCompute) {
  Job job = timed_job(4, 4, 1, 2);
  job.copy_reductions = true;
  Gpu gpu = with_links(4, 0.5, 0.5);
  gpu.nvlink.copied_reductions.rates = {2 * 1000 * 3 / 0.9 / kGb};
  const StepPlan copied = step_of(job, gpu);
  EXPECT_NEAR(copied.transfers.at("reduce"), 4 * 0.9, 1e-6);
  // 4 slices of 1000 numbers of two bytes are read, and one is written.
  gpu.passes["sum"] = 2 * 1000 * 5 / 0.5 / kGb;
  const StepPlan summed = step_of(job, gpu);
  EXPECT_NEAR(summed.transfers.at("reduce"), 4 * 0.4, 1e-6);
  EXPECT_NEAR(summed.transfers.at("sum of gradients"), 4 * 0.5, 1e-6);
  // All but the last reduction's copies run while compute does.
  EXPECT_NEAR(summed.device_seconds, copied.device_seconds + 3 * 0.5, 1e-3);
}

// The all-gathers and reductions on the streams are the Scheduler's answers to
// the events of a plain step.
TEST(StepPlan, HasTheSchedulersActions) {
  const Job job = timed_job(5, 4, 1, 2);
  const auto units = plan_units(job);
  std::vector<UnitSpec> specs;
  for (const UnitPlan& unit : units) {
    specs.push_back(unit.spec);
  }
  int gathers = 0;
  int reductions = 0;
  for (const Action& action : simulate_step(specs, job.scheduler)) {
    gathers += action.kind == ActionKind::gather ? 1 : 0;
    reductions += action.kind == ActionKind::reduce ? 1 : 0;
  }
  EXPECT_EQ(gathers, 5 + 5);
  EXPECT_EQ(reductions, 5);
  const StepPlan step = plan_step(job, units, with_links(4, 0.5, 0.25));
  EXPECT_NEAR(step.transfers.at("all-gather"), gathers * 0.5, 1e-9);
  EXPECT_NEAR(step.transfers.at("reduce"), reductions * 0.25, 1e-9);
}

/// Returns two layers of HSDP over 2 replicas.
/// @param on_outer_axis_alone  their groups have no inner ranks, as experts
/// with
///   one rank on the inner axis have none.
Job replicated_job(int microbatches, bool on_outer_axis_alone) {
  Job job = timed_job(2, 4, 1, 2);
  job.microbatches = microbatches;
  for (const UnitId unit : job.plan_units.layers) {
    GroupShape& group = job.units[unit].groups.front();
    group.strategy = Strategy::named("hsdp", 2);
    group.mesh = {.sizes = {2, 2}, .strides = {2, 1}, .model_ranks = 4};
    if (on_outer_axis_alone) {
      group.mesh.sizes = {2, 1};
    }
  }
  return job;
}

TEST(StepPlan, WeightsLeaveTheHostIfOtherRanksAreBetweenTheirAxes) {
  Job job = small_job(1, 8);
  job.ranks_per_host = 4;
  const UnitId layer = job.plan_units.layers.front();
  GroupShape& group = job.units[layer].groups.front();
  group.strategy = Strategy::named("zero3", 2);
  const auto prices_over = [&](std::vector<std::int64_t> strides) {
    group.mesh = {.sizes = {2, 2}, .strides = strides, .model_ranks = 8};
    return price_unit(plan_units(job)[layer], job, round_gpu());
  };
  const UnitPrices adjacent = prices_over({2, 1});
  EXPECT_FALSE(adjacent.gathers_leave_host);
  EXPECT_FALSE(adjacent.reductions_leave_host);
  const UnitPrices apart = prices_over({4, 1});
  EXPECT_TRUE(apart.gathers_leave_host);
  EXPECT_TRUE(apart.reductions_leave_host);
}

TEST(StepPlan, GroupsOnTheOuterAxisAloneAreReducedOnceInAStep) {
  const Gpu gpu = with_links(2, 0.5, 0.5);
  const StepPlan one = step_of(replicated_job(1, true), gpu);
  const StepPlan many = step_of(replicated_job(3, true), gpu);
  EXPECT_GT(one.transfers.at("reduce over replicas"), 0);
  EXPECT_NEAR(
      many.transfers.at("reduce over replicas"),
      one.transfers.at("reduce over replicas"),
      1e-9);
  EXPECT_NEAR(many.transfers.at("reduce"), 0, 1e-9);
}

// A sum over the inner axes waits from the first microbatch to the last, in
// addition to the gradient for the optimizer.
TEST(StepPlan, InnerSumsAreMemory) {
  for (const bool alone : {false, true}) {
    const auto peak = [&](int microbatches) {
      return step_of(replicated_job(microbatches, alone)).peak_nbytes;
    };
    // 4000 numbers of two units, among the ranks of the inner axis.
    const std::int64_t numel = 2 * 4000 / (alone ? 1 : 2);
    EXPECT_EQ(peak(1), 2 * numel) << alone;
    EXPECT_EQ(peak(2), (2 + 4) * numel) << alone;
  }
}

TEST(StepPlan, ExtrapolatesMicrobatches) {
  Job job = timed_job(3, 4, 1, 2);
  const Gpu gpu = with_links(4, 0.5, 0.5);
  std::map<int, double> seconds;
  for (const int microbatches : {3, 4, 7}) {
    job.microbatches = microbatches;
    seconds[microbatches] = step_of(job, gpu).device_seconds;
  }
  EXPECT_NEAR(seconds[7], seconds[4] + 3 * (seconds[4] - seconds[3]), 1e-6);
  EXPECT_GT(seconds[4] - seconds[3], 9 - 1e-6);
}

TEST(StepPlan, EachMicrobatchInFlightKeepsItsActivations) {
  Job job = timed_job(3, 4, 1, 2);
  job.layer_kinds[0].saved_nbytes = 100;
  job.microbatches = 12;
  const auto activations = [&](int in_flight) {
    job.overlap.in_flight = in_flight;
    return step_of(job).activation_nbytes;
  };
  for (const int in_flight : {3, 4, 7}) {
    EXPECT_EQ(activations(in_flight), activations(2) + (in_flight - 2) * 300);
  }
}

/// All-gathers and reductions of activations of 4 GB among 4 ranks, 3 s each on
/// round_gpu(), around layers of one rank.
Job shared_job(const Kernels& forward) {
  Job job = small_job(2, 1);
  job.tensor_ranks = 4;
  job.ranks = job.ranks_per_host = 4;
  job.layer_kinds[0].nodes[PlanNode::attend].forward = forward;
  return job;
}

Gpu without_updates() {
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = gpu.passes["sum"] = 1e9;
  return gpu;
}

Kernel pass_of(double seconds) {
  return Kernel::memory("norm", seconds * kGb);
}

TEST(StepPlan, ComputeWaitsForActivationsOfOtherRanks) {
  const Job job = shared_job(
      {Kernel::exchange(Transfer::all_gather, 4 * kGb),
       pass_of(1),
       Kernel::exchange(Transfer::reduce_scatter, 4 * kGb)});
  const StepPlan step = step_of(job, without_updates());
  EXPECT_NEAR(step.device_seconds, 2 * (3 + 1 + 3), 1e-3);
  EXPECT_NEAR(step.compute_seconds, 2, 1e-3);
  EXPECT_NEAR(step.exposed_seconds, 12, 1e-3);
  EXPECT_NEAR(step.exposed_tensor_seconds, 12, 1e-3);
  EXPECT_NEAR(step.transfers.at("TP all-gather"), 6, 1e-6);
  EXPECT_NEAR(step.transfers.at("TP reduce-scatter"), 6, 1e-6);
}

// nn::linears works the same way: the inputs are all-gathered in parallel with
// the previous matmul, and the reduction with the next matmul.
TEST(StepPlan, ComputeGoesOnUntilItNeedsTheActivations) {
  const auto start = [](Transfer transfer) {
    return Kernel::exchange(transfer, 4 * kGb, /*overlaps=*/true);
  };
  const auto step_with = [&](double first, double second) {
    return step_of(
        shared_job(
            {start(Transfer::all_gather),
             pass_of(first),
             start(Transfer::reduce_scatter),
             Kernel::finish(),
             pass_of(second),
             Kernel::finish(),
             pass_of(1)}),
        without_updates());
  };
  const StepPlan hidden = step_with(3, 3);
  EXPECT_NEAR(hidden.device_seconds, 2 * (3 + 3 + 1), 1e-3);
  EXPECT_NEAR(hidden.exposed_tensor_seconds, 0, 1e-3);
  // 1 s of the all-gather is left, and 2 s of the reduction.
  const StepPlan exposed = step_with(2, 1);
  EXPECT_NEAR(exposed.device_seconds, 2 * (2 + 1 + 1 + 2 + 1), 1e-3);
  EXPECT_NEAR(exposed.exposed_tensor_seconds, 2 * (1 + 2), 1e-3);
}

TEST(StepPlan, ActivationsGoOverTheNetworkBetweenHosts) {
  Job job = shared_job({Kernel::exchange(Transfer::all_gather, 4 * kGb)});
  EXPECT_NEAR(step_of(job, without_updates()).device_seconds, 2 * 3, 1e-3);
  // 3/4 of 4 GB through ports of 0.5 GB/s.
  job.ranks_per_host = 1;
  EXPECT_NEAR(step_of(job, without_updates()).device_seconds, 2 * 6, 1e-3);
}

TEST(StepPlan, CountsMemoryOverTheStep) {
  Job job = timed_job(3, 2, 1, 2);
  job.layer_kinds[0].saved_nbytes = 100;
  job.layer_kinds[0].input_nbytes = 10;
  job.layer_kinds[0].transient_nbytes = 7;
  job.ends.saved_nbytes = 20;
  job.ends.transient_nbytes = 5;
  const StepPlan step = step_of(job);
  EXPECT_EQ(step.activation_nbytes, 3 * 100 + 20);
  // At the backward of the head all saved memory is allocated, and gradients
  // come later. The last of 3 units' gradients, of 2000 bytes each, exists when
  // nothing else does.
  EXPECT_EQ(step.peak_nbytes, 3 * 1000 * 2);
  job.layer_kinds[0].saved_nbytes = 100000;
  EXPECT_EQ(step_of(job).peak_nbytes, 3 * 100000 + 20 + 5);
  job.layer_kinds[0].saved_nbytes = 100;
  job.overlap.recompute = true;
  EXPECT_EQ(step_of(job).activation_nbytes, 2 * 10 + 100);
}

TEST(StepPlan, ARecomputeDoesNotRunKeptKernels) {
  Job job = timed_job(3, 1, 1, 2);
  job.overlap.recompute = true;
  const double before = step_of(job).compute_seconds;
  Kernels& forward = job.layer_kinds[0].nodes[PlanNode::attend].forward;
  forward.push_back(Kernel::memory("norm", kGb));
  EXPECT_NEAR(step_of(job).compute_seconds - before, 3 + 3, 1e-6);
  forward.back().is_kept = true;
  EXPECT_NEAR(step_of(job).compute_seconds - before, 3, 1e-6);
}

/// Muon's work on the matrices of units from `first` to `last`: 3/4 of 2 s for
/// each exchange on round_gpu(), and 2 s of matmuls.
MatrixWork matrix_work(UnitId first, UnitId last) {
  return {
      .first = first,
      .last = last,
      .exchange_nbytes = 2 * kGb,
      .axes = {{.size = 4}},
      .kernels = {Kernel::matmul(Product::forward, 1e4, 1e4, 1e4)},
      .directions_nbytes = 10000,
      .scratch_nbytes = 5000};
}

TEST(StepPlan, MuonExchangesMatricesAndOrthogonalizesThem) {
  Job job = small_job(3, 4);
  job.matrices = {matrix_work(2, 4)};
  const StepPlan step = step_of(job, without_updates());
  EXPECT_NEAR(step.device_seconds, 1.5 + 2 + 1.5, 1e-3);
  EXPECT_NEAR(step.kinds.at("Newton-Schulz"), 2, 1e-9);
  EXPECT_NEAR(step.transfers.at("exchange of matrices"), 3, 1e-9);
  EXPECT_NEAR(step.exposed_seconds, 3, 1e-3);
}

TEST(StepPlan, ReplicasOfMatricesExchangeNothing) {
  Job job = small_job(3, 4);
  job.matrices = {matrix_work(2, 4)};
  job.matrices[0].exchange_nbytes = 0;
  job.matrices[0].axes = {};
  const StepPlan step = step_of(job, without_updates());
  EXPECT_NEAR(step.device_seconds, 2, 1e-3);
  EXPECT_EQ(step.transfers.count("exchange of matrices"), 0U);
}

// Gradients of 3 units, and buffers. The first window's directions are in
// memory when the second one starts.
TEST(StepPlan, CountsMemoryOfMatrices) {
  constexpr std::int64_t kGradients = 3 * 1000 * 2;
  Job job = small_job(3, 4);
  job.matrices = {matrix_work(2, 2), matrix_work(3, 4)};
  EXPECT_EQ(step_of(job).peak_nbytes, kGradients + 10000 + 5000);
  job.matrices = {matrix_work(2, 3), matrix_work(3, 4)};
  EXPECT_EQ(step_of(job).peak_nbytes, kGradients + 2 * 10000 + 5000);
}

// States of a unit take 1 s each way. With two slots, the upload of a unit is
// parallel to the download of the unit before it. The first uploads are
// parallel to the forward.
TEST(StepPlan, StatesArriveWhileOthersLeave) {
  Job job = timed_job(5, 1, 2, 4);
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = 1e9;
  gpu.host_gb_s = 8 * 1000 / kGb;
  const double before = step_of(job, gpu).device_seconds;
  job.copied_states.resize(job.units.size());
  for (const UnitId unit : job.plan_units.layers) {
    job.copied_states[unit] = 8 * 1000;
  }
  const StepPlan step = step_of(job, gpu);
  // Two units have arrived. The third waits for a download and its upload, and
  // each of the others for an upload.
  EXPECT_NEAR(step.device_seconds, before + 2 + 1 + 1, 1e-3);
  EXPECT_NEAR(step.transfers.at("upload of states"), 5, 1e-9);
  EXPECT_NEAR(step.transfers.at("download of states"), 5, 1e-9);
}

// Forwards of 2 s hide copies of 1 s, and share the GPU with updates of 1 s.
TEST(StepPlan, UpdatesOverlapWithTheNextForward) {
  Job job = timed_job(5, 1, 2, 4);
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = 1000 * kAdamWNbytes / kGb;
  const double before = step_of(job, gpu).device_seconds;
  EXPECT_NEAR(before, 5 * (2 + 4 + 1), 1e-3);
  job.copied_states.resize(job.units.size());
  for (const UnitId unit : job.plan_units.layers) {
    job.copied_states[unit] = 8 * 1000;
  }
  gpu.host_gb_s = 8 * 1000 / kGb;
  EXPECT_GT(step_of(job, gpu).device_seconds, before + 1);
  job.overlap_updates = true;
  const StepPlan step = step_of(job, gpu);
  EXPECT_NEAR(step.device_seconds, before, 1e-3);
  EXPECT_NEAR(step.exposed_seconds, 0, 1e-3);
  EXPECT_EQ(step.transfers.count("optimizer"), 0);
}

TEST(StepPlan, AForwardWaitsForTheUpdateOfItsUnit) {
  Job job = timed_job(2, 1, 2, 4);
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = 1000 * kAdamWNbytes / kGb;
  job.overlap_updates = true;
  // 1 s of the first update, then 2 s of forward in parallel with 1 s of the
  // second one.
  const StepPlan step = step_of(job, gpu);
  EXPECT_NEAR(step.device_seconds, 2 * (2 + 4 + 1), 1e-3);
  job.updates[job.plan_units.layers[0]].front().nbytes = 0;
  job.updates[job.plan_units.layers[1]].front().nbytes *= 20;
  // The second forward waits for 20 s of its update.
  EXPECT_NEAR(step_of(job, gpu).device_seconds, 20 + 2 * (2 + 4), 1e-3);
}

TEST(StepPlan, EachRunOverTokensIsALaunch) {
  Job job = timed_job(1, 1, 4, 4);
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = 1e9;
  gpu.host_forward_us = 1e6;
  gpu.launch_us = 1e6;
  const StepPlan whole = step_of(job, gpu);
  NodeWork& node = job.layer_kinds[0].nodes[PlanNode::attend];
  node.forward = in_runs(node.forward, 4);
  const StepPlan runs = step_of(job, gpu);
  EXPECT_NEAR(runs.device_seconds, whole.device_seconds + 3, 1e-3);
  EXPECT_NEAR(runs.host_seconds, whole.host_seconds + 3, 1e-9);
}

TEST(Kernel, RunsDivideTheTokens) {
  const Kernel forward = Kernel::matmul(Product::forward, 8, 3, 5).in_runs(4);
  EXPECT_EQ(forward.m, 2);
  const Kernel wgrad = Kernel::matmul(Product::wgrad, 3, 5, 8).in_runs(4);
  EXPECT_EQ(wgrad.k, 2);
  EXPECT_EQ(forward.flops(), wgrad.flops());
  EXPECT_EQ(forward.flops(), 2 * 8 * 3 * 5);
}

// A layer's kept activations take 1 s each way, less than its forward. Two
// layers at a time have kept activations on the GPU: one layer computes, and
// its neighbor's copy runs.
TEST(StepPlan, KeptActivationsAreCopiedWhileOthersCompute) {
  constexpr int kLayers = 5;
  constexpr std::int64_t kKept = 8 * 1000;
  Job job = timed_job(kLayers, 1, 2, 4);
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = 1e9;
  job.layer_kinds[0].saved_nbytes = kKept;
  const StepPlan before = step_of(job, gpu);
  EXPECT_EQ(before.activation_nbytes, kLayers * kKept);
  job.plan_units.kept_nbytes.assign(kLayers, kKept);
  gpu.host_gb_s = kKept / kGb;
  const StepPlan step = step_of(job, gpu);
  EXPECT_EQ(step.activation_nbytes, 2 * kKept);
  EXPECT_NEAR(step.device_seconds, before.device_seconds, 1e-3);
  EXPECT_NEAR(step.transfers.at("download of activations"), kLayers, 1e-9);
  EXPECT_NEAR(step.transfers.at("upload of activations"), kLayers - 1, 1e-9);
  // Copies of 3 s: each forward but the first waits for one more second.
  gpu.host_gb_s = kKept / kGb / 3;
  EXPECT_NEAR(
      step_of(job, gpu).device_seconds,
      before.device_seconds + kLayers - 1,
      1e-3);
}

TEST(StepPlan, TheHostMayBeWhatTakesLonger) {
  const Job job = timed_job(4, 1, 1e-3, 1e-3);
  Gpu gpu = round_gpu();
  gpu.passes["optimizer"] = 1e9;
  gpu.host_forward_us = 1e6;
  gpu.host_backward_us = 2e6;
  const StepPlan step = step_of(job, gpu);
  // 4 layers, and a quarter of one for each of embedding and head.
  EXPECT_NEAR(step.host_seconds, 4.5 * 3, 1e-9);
  EXPECT_EQ(step.seconds, step.host_seconds);
}

}  // namespace
}  // namespace flatshard::plan
