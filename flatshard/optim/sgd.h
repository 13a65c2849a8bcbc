#pragma once

#include "flatshard/optim/optimizer.h"

namespace flatshard {

struct SgdOptions {
  double momentum = 0.0;
  double weight_decay = 0.0;
};

/// SGD with momentum and decoupled weight decay. State per group: momentum,
/// float32, only when the factor is not 0.
class Sgd : public Optimizer {
 public:
  Sgd(std::vector<ParamGroup*> groups, SgdOptions options);

  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const override;

 protected:
  void update(std::size_t group, FlatUpdate& update, double lr) override;

 private:
  SgdOptions options_;
  std::vector<at::Tensor> momentum_;
};

}  // namespace flatshard
