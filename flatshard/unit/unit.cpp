#include "flatshard/unit/unit.h"

#include "flatshard/nn/module.h"

#include <utility>

namespace flatshard {

Unit::Unit(
    UnitId id,
    std::string name,
    nn::Module* module,
    UnitGroups groups,
    UnitParameters parameters)
    : id_(id),
      name_(std::move(name)),
      module_(module),
      groups_(std::move(groups)),
      parameters_(std::move(parameters)),
      weights_(name_, groups_),
      gradients_(groups_, parameters_, /*writes_in_place=*/module != nullptr),
      pointers_(
          name_,
          /*refuses=*/module != nullptr,
          groups_,
          parameters_,
          weights_) {
}

void Unit::adopt_foreign_writes() {
  for (const auto& group : groups_) {
    group->weights().adopt_foreign_writes();
  }
}

UnitSpec Unit::spec(UnitId parent, UnitPolicy policy) const {
  UnitSpec spec = weights_.planes();
  spec.name = name_;
  spec.parent = parent;
  spec.policy = std::move(policy);
  weights_.describe(spec);
  spec.grad_nbytes = gradients_.nbytes();
  spec.grads_in_place = gradients_.writes_in_place();
  spec.reduce_every_microbatch = false;
  for (const auto& group : groups_) {
    const Placements& gradient = group->strategy().gradient;
    if (group->trainable() && num_sharded_axes(gradient) > 0) {
      spec.reduce_every_microbatch = true;
    }
  }
  return spec;
}

}  // namespace flatshard
