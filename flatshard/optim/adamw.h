#pragma once

#include "flatshard/optim/optimizer.h"

namespace flatshard {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

/// AdamW with decoupled weight decay and bias correction, arXiv:1711.05101.
/// State per group: exp_avg and exp_avg_sq, float32.
class AdamW : public Optimizer {
 public:
  AdamW(std::vector<ParamGroup*> groups, AdamWOptions options);

  /// Sets AdamWOptions::beta1, beta2 and eps from the next step on.
  /// @throws Error{config} when one is out of range.
  void set_coefficients(double beta1, double beta2, double eps);

  std::vector<std::pair<std::string, at::Tensor>> state(
      std::size_t group) const override;

 protected:
  void update(std::size_t group, FlatUpdate& update, double lr) override;
  bool writes_float8() const override { return true; }

 private:
  double beta1_ = 0;
  double beta2_ = 0;
  double eps_ = 0;
  std::vector<at::Tensor> exp_avg_;
  std::vector<at::Tensor> exp_avg_sq_;
};

}  // namespace flatshard
