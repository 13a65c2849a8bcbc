#pragma once

#include "flatshard/graphs/unit_slots.h"
#include "flatshard/nn/weight_source.h"

#include <cstddef>
#include <optional>
#include <vector>

namespace flatshard {

class UnitCalls;

/// The fixed places of a unit's FP8 planes: what layers get when their kernels
/// are recorded in a graph, and which planes they read. A replay requests the
/// same and compares addresses.
class PlanePlaces : public nn::WeightSource {
 public:
  /// @param slots  of the steps that were watched.
  PlanePlaces(const UnitSlots& slots, bool in_backward)
      : slots_(slots), in_backward_(in_backward) {}

  std::optional<nn::WeightRecipe> recipe(
      const at::Tensor& parameter) const override;
  std::optional<nn::EncodedWeight> plane(
      const at::Tensor& parameter,
      nn::PlaneUse use) override;

  /// Compute waits for all that was read. False: some of it is elsewhere.
  bool await(UnitCalls& calls) const;
  /// Returns memory that kernels read.
  const std::vector<at::Tensor>& memory() const { return memory_; }

 private:
  struct Read {
    std::size_t parameter = 0;
    nn::PlaneUse use{};
    const void* data = nullptr;
  };

  /// Returns null when it is not an FP8 parameter of the unit.
  const UnitParameter* find(const at::Tensor& parameter) const;

  UnitSlots slots_;
  bool in_backward_;
  std::vector<Read> reads_;
  std::vector<at::Tensor> memory_;
};

}  // namespace flatshard
