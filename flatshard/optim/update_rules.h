#pragma once

#include "flatshard/optim/adamw_rule.h"
#include "flatshard/optim/parameter_values.h"
#include "flatshard/optim/sgd_rule.h"

/// The optimizers that update each element separately. Loops of the CPU and
/// CUDA kernels call the same function of a rule:
///
///   update(const UpdateRow&, float& w, float g, float& state0, float& state1)
///
/// A rule without states in other formats than float32 names them in kStates,
/// and ElementAlgorithm keeps them.
namespace flatshard {

/// Calls call(rule), and returns whether the algorithm has a rule.
template <class Call>
bool with_update_rule(Algorithm algorithm, Call call) {
  switch (algorithm) {
    case Algorithm::adamw:
      call(AdamWRule());
      return true;
    case Algorithm::sgd:
      call(SgdRule());
      return true;
    case Algorithm::muon:
      return false;
  }
  return false;
}

}  // namespace flatshard
