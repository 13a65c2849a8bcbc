#include "flatshard/nn/dropout.h"

#include "flatshard/core/error.h"

namespace flatshard::nn {

DropoutImpl::DropoutImpl(double p, std::optional<at::Generator> generator)
    : Module("Dropout"), p_(p), generator_(std::move(generator)) {
  FLATSHARD_CHECK(
      p >= 0.0 && p < 1.0,
      config,
      "dropout p: expected [0, 1), got {}",
      p);
}

at::Tensor DropoutImpl::forward(const at::Tensor& x) {
  if (!is_training() || p_ == 0.0) {
    return x;
  }
  at::Tensor mask;
  {
    const at::NoGradGuard no_grad;
    mask = at::empty_like(x).bernoulli_(1.0 - p_, generator_).div_(1.0 - p_);
  }
  return x * mask;
}

std::vector<at::Generator> DropoutImpl::own_generators() const {
  return generator_ ? std::vector{*generator_} : std::vector<at::Generator>{};
}

}  // namespace flatshard::nn
