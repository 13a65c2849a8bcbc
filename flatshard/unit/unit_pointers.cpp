#include "flatshard/unit/unit_pointers.h"

#include "flatshard/core/error.h"

#include <utility>

namespace flatshard {

UnitPointers::UnitPointers(
    std::string unit,
    bool refuses,
    const UnitGroups& groups,
    UnitParameters& parameters,
    const UnitWeights& weights)
    : unit_(std::move(unit)),
      refuses_(refuses),
      groups_(groups),
      parameters_(parameters),
      weights_(weights) {
  for (UnitParameter& p : parameters_) {
    const ParamGroup& group = *groups_[p.group];
    if (group.weights().resident() && group.weights().has(kComputePlane) &&
        p.storage.has_values()) {
      has_residents_ = true;
      p.storage.point_at(group.weights()
                             .view(
                                 kComputePlane,
                                 kWhole,
                                 p.index,
                                 group.weights().compute().local())
                             .data.data_ptr());
    }
  }
}

void UnitPointers::check_storage() const {
  for (const UnitParameter& p : parameters_) {
    FLATSHARD_CHECK(
        p.storage.is_intact(),
        usage,
        "parameter {} of unit {} was given another storage (`p.data = x` or "
        "`set_`); write into the shards of its group with copy_ instead "
        "(Runtime::all_groups, ParamGroup::main_shards)",
        p.name,
        unit_);
  }
}

void UnitPointers::check_not_shared() const {
  for (const UnitParameter& p : parameters_) {
    if (!groups_[p.group]->weights().resident()) {
      p.storage.check_not_shared();
    }
  }
}

void UnitPointers::point_at(const SlotView& slot) {
  check_storage();
  for (UnitParameter& p : parameters_) {
    const ParamGroup& group = *groups_[p.group];
    if (!group.weights().resident()) {
      p.storage.point_at(slot.at(weights_.offset(p)));
    } else if (!shown_) {
      p.storage.show();
    }
  }
  shown_ = true;
}

void UnitPointers::clear() {
  for (UnitParameter& p : parameters_) {
    if (!groups_[p.group]->weights().resident()) {
      p.storage.clear();
    }
  }
  shown_ = shown_ && has_residents_;
}

void UnitPointers::hide() {
  if (refuses_ && shown_) {
    shown_ = false;
    for (const UnitParameter& p : parameters_) {
      p.storage.hide();
    }
  }
}

void UnitPointers::show() {
  if (!shown_) {
    shown_ = true;
    for (const UnitParameter& p : parameters_) {
      p.storage.show();
    }
  }
}

}  // namespace flatshard
