#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "flatshard/core/float_arithmetic.h"
#include "flatshard/optim/parameter_values.h"
#include "flatshard/optim/update_step.h"

namespace flatshard {

/// SGD with momentum and decoupled weight decay:
///   w -= lr * decay * w;  u = momentum u + g;  w -= lr * u
struct SgdRule {
  static constexpr int kRequiredStates = 0;
  static constexpr bool kWritesFloat8 = false;
  static constexpr std::array<const char*, 1> kStates = {"momentum"};

  static bool has_states(std::span<const ParameterValues> values) {
    return std::any_of(
        values.begin(),
        values.end(),
        [](const ParameterValues& v) { return v.momentum > 0; });
  }

  static UpdateRow
  row(const ParameterValues& values, double lr, std::int64_t updates) {
    return SgdStep{
        .lr = static_cast<float>(lr),
        .weight_decay = static_cast<float>(values.weight_decay),
        .momentum = static_cast<float>(values.momentum),
        .first = updates == 1}
        .row();
  }

  FLATSHARD_ARITHMETIC static void
  update(const UpdateRow& s, float& w, float g, float& u, float& /*none*/) {
    using namespace float_arithmetic;
    u = plus(g, times(s.momentum, u));
    w = plus(times(w, kept(s)), -times(s.lr, u));
  }
};

}  // namespace flatshard
