#pragma once

#include "flatshard/optim/optimizer.h"
#include "flatshard/optim/update_algorithm.h"

#include <map>

namespace flatshard {

struct SgdOptions {
  double momentum = 0.0;
  double weight_decay = 0.0;
};

/// SGD with momentum and decoupled weight decay. State per group: momentum,
/// float32, only when the factor of a parameter is not 0.
class SgdAlgorithm : public UpdateAlgorithm {
 public:
  void add_group(
      std::size_t group,
      const at::Tensor& main,
      std::span<const ParameterValues> values) override;
  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const override;
  UpdateRow row(const ParameterValues& values, double lr, std::int64_t updates)
      const override;
  void update(std::size_t group, FlatUpdate& update) override;

 private:
  std::map<std::size_t, at::Tensor> momentum_;  ///< by group
};

/// An Optimizer that updates all parameters with SGD.
class Sgd : public Optimizer {
 public:
  /// As AdamW's constructor.
  Sgd(std::vector<ParamGroup*> groups, SgdOptions options);
};

}  // namespace flatshard
