#pragma once

#include "flatshard/plan/links.h"
#include "flatshard/plan/slot_places.h"
#include "flatshard/plan/step_record.h"
#include "flatshard/plan/unit_prices.h"

#include <map>
#include <vector>

namespace flatshard::plan {

/// Queues the operations of the Scheduler's actions: models how the Executor
/// uses streams and slots. It does not own the references.
class UnitOperations {
 public:
  /// @param slowed_gpu  with_slowed_links(gpu).
  UnitOperations(
      const Job& job,
      const std::vector<UnitPlan>& units,
      const Gpu& gpu,
      const Gpu& slowed_gpu,
      StepRecord& record);

  /// @param plan  offsets of the slots of a steady step.
  void use_slots(SlotPlan plan) { places_ = SlotPlaces(std::move(plan)); }
  const SlotPlan& slots() const { return places_.plan(); }
  const std::vector<UnitSpec>& specs() const { return specs_; }

  /// Forgets which units have gradients.
  void begin_step();
  void carry_out(const Action& action, int microbatch);
  /// Queues the norm of the gradients and the optimizer.
  void update();
  /// Returns the last update of a unit if no all-gather waits for it, else
  /// kNoOperation.
  int update_of(UnitId unit) const { return states_[unit].updated; }

 private:
  struct Weights {
    std::int64_t begin = -1;  ///< in the arena; -1: no slot
    int filled = kNoOperation;
    int read_by_gather = kNoOperation;
  };
  struct UnitState {
    std::int64_t grads = -1;
    int reduced = kNoOperation;
    bool has_gradients = false;
    bool has_local = false;
    int updated = kNoOperation;  ///< by the optimizer; waited for once
  };

  /// The kept activations of one call, and their copies.
  struct Kept {
    int downloaded = kNoOperation;
    int uploaded = kNoOperation;
    std::int64_t nbytes = 0;
  };

  Weights& weights_of(UnitId unit, PlaneId plane, PartId part);
  std::vector<int> take_slot(const Action& action, Weights& held);
  void gather(const Action& action, int microbatch);
  void derive(const Action& action, int microbatch);
  void release(const Action& action);
  void acquire_grads(UnitId unit);
  void reduce(const Action& action, int microbatch);
  void accumulate(UnitId unit, int microbatch);
  void download(const Action& action, int microbatch);
  void upload(const Action& action, int microbatch);
  void update_unit(UnitId unit, std::vector<int>& downloads);
  int queue_update(Operation operation);
  void orthogonalize(const MatrixWork& work);
  void exchange_matrices(const MatrixWork& work);

  const Job& job_;
  const std::vector<UnitPlan>& units_;
  const Gpu& gpu_;
  const Gpu& slowed_gpu_;
  StepRecord& record_;
  std::vector<UnitSpec> specs_;
  std::vector<UnitPrices> prices_;
  std::vector<UnitPrices> slowed_prices_;  ///< of transfers in parallel with
                                           ///< compute
  SlotPlaces places_;
  std::vector<std::vector<Weights>> weights_;  ///< by unit and slice
  std::vector<UnitState> states_;
  std::map<CallId, Kept> kept_;
  std::vector<int> update_waits_;       ///< of the optimizer's next operation
  std::int64_t directions_nbytes_ = 0;  ///< of MatrixWork in flight
};

}  // namespace flatshard::plan
