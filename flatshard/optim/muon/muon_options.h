#pragma once

#include <functional>
#include <vector>

#include "flatshard/comm/communicator.h"
#include "flatshard/group/group_parameter.h"
#include "flatshard/group/param_group.h"
#include "flatshard/optim/muon/matrix_plan.h"

namespace flatshard {

/// Returns the matrices of a parameter, one after another, together all of it.
/// Empty: the parameter is not updated by Muon.
using MatricesOf =
    std::function<std::vector<MatrixShape>(const GroupParameter&)>;

/// Returns a parameter with two dimensions as one matrix.
std::vector<MatrixShape> one_matrix(const GroupParameter& parameter);

/// Returns the ranks that store a parameter together, each another part; null
/// when this rank stores all of it. Called in the same order on all ranks.
using RanksOf =
    std::function<Communicator*(const ParamGroup&, const GroupParameter&)>;

/// Returns the ranks of the model's mesh that store the group together.
Communicator* ranks_of_group(
    const ParamGroup& group,
    const GroupParameter& parameter);

/// Options that all matrices of an optimizer share.
struct MuonOptions {
  MatricesOf matrices_of = one_matrix;
  RanksOf ranks_of = ranks_of_group;
};

}  // namespace flatshard
