#pragma once

namespace flatshard {

/// The arithmetic of an update, UpdateAlgorithm.
enum class Algorithm { adamw, sgd };

/// Values that parameters of one parameter group share.
struct ParameterValues {
  Algorithm algorithm = Algorithm::adamw;
  double lr_mult = 1;  ///< multiplied into the learning rate of each step
  double weight_decay = 0;
  double beta1 = 0.9;   ///< AdamW
  double beta2 = 0.95;  ///< AdamW
  double eps = 1e-8;    ///< AdamW
  double momentum = 0;  ///< SGD

  /// @throws Error{config} when a value is out of range.
  void validate() const;
  bool operator==(const ParameterValues&) const = default;
};

}  // namespace flatshard
