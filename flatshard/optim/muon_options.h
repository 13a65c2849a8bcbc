#pragma once

#include <functional>
#include <vector>

#include "flatshard/group/group_parameter.h"
#include "flatshard/optim/matrix_plan.h"
#include "flatshard/optim/newton_schulz.h"
#include "flatshard/optim/parameter_values.h"

namespace flatshard {

/// Returns the matrices of a parameter, one after another, together all of it.
/// Empty: the parameter is not updated by Muon.
using MatricesOf =
    std::function<std::vector<MatrixShape>(const GroupParameter&)>;

/// Returns a parameter with two dimensions as one matrix.
std::vector<MatrixShape> one_matrix(const GroupParameter& parameter);

/// Options that all matrices of an optimizer share.
struct MuonOptions {
  bool nesterov = true;
  NewtonSchulzOptions newton_schulz;
  AdjustLr adjust_lr = AdjustLr::original;
  MatricesOf matrices_of = one_matrix;
};

}  // namespace flatshard
