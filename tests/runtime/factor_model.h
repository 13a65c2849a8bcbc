#pragma once

#include "flatshard/nn/linear.h"
#include "flatshard/nn/region.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

namespace flatshard::testing {

/// x + linear(x) * factor, where factor is not a parameter.
class FactorBlockImpl : public nn::Module {
 public:
  FactorBlockImpl(std::int64_t dim, at::Tensor factor, bool declared)
      : factor_(std::move(factor)), declared_(declared) {
    linear_ = register_module("linear", nn::Linear(dim, dim));
  }
  at::Tensor forward(const at::Tensor& x) {
    nn::RegionOptions options;
    if (declared_) {
      options.constants = {factor_};
    }
    return nn::region(
        *this,
        "block",
        [this](const nn::TensorList& in) {
          seen().push_back({at::GradMode::is_enabled(), is_training()});
          if (waits) {
            in[0].sum().item<float>();
          }
          return nn::TensorList{in[0] + linear_(in[0]) * factor_};
        },
        {x},
        options)[0];
  }
  /// The region waits for the device, so it cannot be recorded.
  bool waits = false;

  /// In which modes the region's function ran, for all blocks of a thread.
  struct Seen {
    bool grad_mode = false;
    bool training = false;
  };
  static std::vector<Seen>& seen() {
    static thread_local std::vector<Seen> all;
    return all;
  }
  void set_factor(at::Tensor factor) { factor_ = std::move(factor); }

 private:
  nn::Linear linear_{nullptr};
  at::Tensor factor_;
  bool declared_;
};
FLATSHARD_MODULE(FactorBlock);

/// Blocks that share a factor; the mean square of what the last one gives.
class FactorModelImpl : public nn::Module {
 public:
  static constexpr int kNumBlocks = 4;

  /// @param declared  as a constant of the regions.
  FactorModelImpl(std::int64_t dim, const at::Tensor& factor, bool declared) {
    for (int i = 0; i < kNumBlocks; ++i) {
      blocks_.push_back(register_module(
          "block" + std::to_string(i),
          FactorBlock(dim, factor, declared)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (FactorBlock& block : blocks_) {
      y = block(y);
    }
    return y.square().mean();
  }
  /// From now on; what the regions were recorded with is another tensor.
  void set_factor(const at::Tensor& factor) {
    for (FactorBlock& block : blocks_) {
      block->set_factor(factor);
    }
  }
  FactorBlock& block(int i) { return blocks_.at(i); }
  std::vector<nn::Module*> units() {
    std::vector<nn::Module*> units;
    for (FactorBlock& block : blocks_) {
      units.push_back(block.get());
    }
    return units;
  }

 private:
  std::vector<FactorBlock> blocks_;
};
FLATSHARD_MODULE(FactorModel);

}  // namespace flatshard::testing
