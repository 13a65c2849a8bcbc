#pragma once

#include "flatshard/nn/module.h"

#include <optional>

namespace flatshard::nn {

/// Zeroes elements with probability p in training and scales the rest by
/// 1 / (1 - p). Draws from `generator`, or from the device's default generator.
/// Ranks that are threads of one process share the default one.
class DropoutImpl : public Module {
 public:
  explicit DropoutImpl(
      double p,
      std::optional<at::Generator> generator = std::nullopt);
  at::Tensor forward(const at::Tensor& x);
  std::vector<at::Generator> own_generators() const override;

 private:
  double p_;
  std::optional<at::Generator> generator_;
};
FLATSHARD_MODULE(Dropout);

}  // namespace flatshard::nn
