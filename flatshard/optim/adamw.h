#pragma once

#include "flatshard/optim/optimizer.h"
#include "flatshard/optim/update_algorithm.h"

#include <map>

namespace flatshard {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

/// AdamW with decoupled weight decay and bias correction, arXiv:1711.05101.
/// State per group: exp_avg and exp_avg_sq, float32.
class AdamWAlgorithm : public UpdateAlgorithm {
 public:
  void add_group(
      std::size_t group,
      const at::Tensor& main,
      std::span<const ParameterValues> values) override;
  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const override;
  UpdateRow row(const ParameterValues& values, double lr, std::int64_t updates)
      const override;
  void update(std::size_t group, FlatUpdate& update) const override;
  bool writes_float8() const override { return true; }

 private:
  struct States {
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
  };
  std::map<std::size_t, States> states_;  ///< by group
};

/// An Optimizer that updates all parameters with AdamW. For parameters with
/// other values, see ParameterRules.
class AdamW : public Optimizer {
 public:
  /// Parameters whose attribute kWeightDecayAttribute is "none" are not
  /// decayed.
  /// @throws Error{config} when an option is out of range.
  AdamW(std::vector<ParamGroup*> groups, AdamWOptions options);
};

}  // namespace flatshard
