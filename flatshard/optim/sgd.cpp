#include "flatshard/optim/sgd.h"

#include <utility>

namespace flatshard {

Sgd::Sgd(std::vector<ParamGroup*> groups, SgdOptions options)
    : Optimizer(
          std::move(groups),
          ParameterRules{
              .rest =
                  {.algorithm = Algorithm::sgd,
                   .weight_decay = options.weight_decay,
                   .momentum = options.momentum}},
          options.offload) {
}

}  // namespace flatshard
