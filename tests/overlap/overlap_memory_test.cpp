// Measures the additional memory of a step of two microbatches over plain
// accumulation.
#include "flatshard/schedule/slot_plan.h"
#include "tests/overlap/overlap_moe.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>

namespace flatshard::testing {
namespace {

// -- slots -------------------------------------------------------------------

struct SlotPeaks {
  std::int64_t weights = 0;
  std::int64_t gradients = 0;
  // The sizes of one unit, the largest.
  std::int64_t unit_weights = 0;
  std::int64_t unit_gradients = 0;
};

SlotPeaks peaks_of(const Runtime& runtime) {
  SlotPeaks peaks;
  std::map<std::int64_t, std::int64_t> weights;  // changes, by moment
  std::map<std::int64_t, std::int64_t> gradients;
  std::map<UnitId, std::int64_t> of_unit;
  const auto& specs = runtime.scheduler().units();
  for (const SlotLifetime& life :
       slot_lifetimes(specs, runtime.trace().actions)) {
    const bool is_gradient = life.key.role == SlotRole::gradients;
    auto& changes = is_gradient ? gradients : weights;
    changes[life.begin] += life.nbytes;
    changes[life.end] -= life.nbytes;
    auto& largest = is_gradient ? peaks.unit_gradients : peaks.unit_weights;
    largest = std::max(largest, life.nbytes);
  }
  const auto highest = [](const auto& changes) {
    std::int64_t held = 0;
    std::int64_t most = 0;
    for (const auto& [moment, change] : changes) {
      held += change;
      most = std::max(most, held);
    }
    return most;
  };
  peaks.weights = highest(weights);
  peaks.gradients = highest(gradients);
  return peaks;
}

// Addresses equal the plan's in every step.
SlotPeaks train_and_look(const MoeOverlapCase& c) {
  SlotPeaks peaks;
  run_ranks(c.world(), [&](RankContext& context) {
    MoeOverlapTrainer trainer(c, context.mesh(c.axes()));
    for (int step = 0; step < 3; ++step) {
      trainer.runtime->clear_trace();
      trainer.forward_backward(step);
      if (context.rank == 0) {
        peaks = peaks_of(*trainer.runtime);
      }
      trainer.update();
    }
    if (c.with_runner) {
      EXPECT_EQ(trainer.runtime->executor().slots().pool().num_dynamic(), 0);
    }
  });
  return peaks;
}

TEST(OverlapMemory, TwoGatheredUnitsAndOneGradientSlotMore) {
  for (const int ep : {1, 2}) {
    MoeOverlapCase c{.ep = ep, .layers = 5, .max_delay_us = 0};
    c.with_runner = false;
    const SlotPeaks plain = train_and_look(c);
    c.with_runner = true;
    for (const bool late_and_recompute : {false, true}) {
      c.options = {
          .delay_wgrad = late_and_recompute,
          .recompute = late_and_recompute};
      SCOPED_TRACE(c.name());
      const SlotPeaks both = train_and_look(c);
      EXPECT_GT(both.weights, plain.weights);
      EXPECT_LE(both.weights, plain.weights + 2 * plain.unit_weights);
      EXPECT_LE(both.gradients, plain.gradients + plain.unit_gradients);
    }
  }
}

// -- activations -------------------------------------------------------------

/// The CPU's memory of torch, counted.
class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* const memory = c10::alloc_cpu(nbytes);
    if (memory == nullptr) {
      return {nullptr, nullptr, &give_back, at::Device(at::kCPU)};
    }
    const std::lock_guard lock(mutex_);
    sizes_[memory] = static_cast<std::int64_t>(nbytes);
    held_ += static_cast<std::int64_t>(nbytes);
    peak_ = std::max(peak_, held_);
    return {memory, memory, &give_back, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    default_copy_data(to, from, n);
  }

  /// Returns the peak memory of `work` above the memory allocated before it.
  std::int64_t most_during(const std::function<void()>& work) {
    std::int64_t rest = 0;
    {
      const std::lock_guard lock(mutex_);
      rest = peak_ = held_;
    }
    work();
    const std::lock_guard lock(mutex_);
    return peak_ - rest;
  }

  static CountingAllocator& instance() {
    static auto* const all = new CountingAllocator;  // outlives every tensor
    return *all;
  }

 private:
  static void give_back(void* memory) {
    CountingAllocator& self = instance();
    {
      const std::lock_guard lock(self.mutex_);
      const auto found = self.sizes_.find(memory);
      self.held_ -= found->second;
      self.sizes_.erase(found);
    }
    c10::free_cpu(memory);
  }

  std::mutex mutex_;
  std::unordered_map<void*, std::int64_t> sizes_;
  std::int64_t held_ = 0;
  std::int64_t peak_ = 0;
};

// Counts torch's memory only: slots are in an arena that exists before.
std::int64_t most_in_a_step(const MoeOverlapCase& c) {
  std::int64_t most = 0;
  run_ranks(1, [&](RankContext& context) {
    MoeOverlapTrainer trainer(c, context.mesh(c.axes()));
    for (int step = 0; step < 2; ++step) {
      most = CountingAllocator::instance().most_during(
          [&] { trainer.forward_backward(step); });
      // They come in the step and leave after it.
      for (ParamGroup* group : trainer.runtime->groups()) {
        most -= static_cast<std::int64_t>(
            group->gradients().reduced().local().nbytes());
      }
      trainer.update();
    }
  });
  return most;
}

TEST(OverlapMemory, OneLayersActivationsMore) {
  auto& counting = CountingAllocator::instance();
  c10::Allocator* const before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, 1);
  MoeOverlapCase c{
      .edp = 1,
      .exchanges_alone = true,
      .layers = 6,
      .dense_layers = 0,
      .tokens = 256,
      .max_delay_us = 0};
  c.with_runner = false;
  const std::int64_t plain = most_in_a_step(c);
  c.layers = 7;
  const std::int64_t layer = most_in_a_step(c) - plain;
  c.layers = 6;
  c.with_runner = true;
  const std::int64_t both = most_in_a_step(c);
  c.options.delay_wgrad = true;
  const std::int64_t late = most_in_a_step(c);
  c.options.recompute = true;
  const std::int64_t recomputed = most_in_a_step(c);
  c10::SetCPUAllocator(before, 1);
  EXPECT_GT(layer, 0);
  EXPECT_LE(both, plain + layer);
  // The inputs of one layer's delayed weight gradients.
  EXPECT_LE(late, plain + 2 * layer);
  // All layers but one keep only their input.
  EXPECT_LT(recomputed, plain - 4 * layer);
}

}  // namespace
}  // namespace flatshard::testing
