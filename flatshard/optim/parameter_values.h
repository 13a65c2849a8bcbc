#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "flatshard/optim/state_format.h"

namespace flatshard {

/// The arithmetic of an update, UpdateAlgorithm.
enum class Algorithm { adamw, sgd, muon };

/// An algorithm's name in texts, and the values that belong to it.
struct AlgorithmFacts {
  Algorithm algorithm;
  const char* name;
  bool has_betas = false;  ///< and eps
  bool has_momentum = false;
};
inline constexpr AlgorithmFacts kAlgorithms[] = {
    {.algorithm = Algorithm::adamw, .name = "adamw", .has_betas = true},
    {.algorithm = Algorithm::sgd, .name = "sgd", .has_momentum = true},
    {.algorithm = Algorithm::muon, .name = "muon", .has_momentum = true}};

/// The factor that adapts the learning rate to a matrix of A rows and B
/// columns, with the names of torch.optim.Muon.
enum class AdjustLr {
  original,            ///< sqrt(max(1, A / B))
  match_rms_adamw,     ///< 0.2 sqrt(max(A, B)): updates are as large as AdamW's
  spectral_unclamped,  ///< sqrt(A / B)
};

/// The iteration that orthogonalizes matrices, with the defaults of
/// torch.optim.Muon.
struct NewtonSchulzOptions {
  std::array<double, 3> coefficients = {3.4445, -4.7750, 2.0315};
  std::int64_t steps = 5;
  double eps = 1e-7;  ///< lower limit of the norm that divides a matrix

  /// @throws Error{config} when a value is out of range.
  void validate() const;
  bool operator==(const NewtonSchulzOptions&) const = default;
};

/// Values of Muon, with the defaults of torch.optim.Muon.
struct MuonValues {
  bool nesterov = true;
  NewtonSchulzOptions newton_schulz;
  AdjustLr adjust_lr = AdjustLr::original;

  bool operator==(const MuonValues&) const = default;
};

/// Values that parameters of one parameter group share.
struct ParameterValues {
  Algorithm algorithm = Algorithm::adamw;
  double lr_mult = 1;  ///< multiplied into the learning rate of each step
  double weight_decay = 0;
  double beta1 = 0.9;   ///< AdamW
  double beta2 = 0.95;  ///< AdamW
  double eps = 1e-8;    ///< AdamW
  double momentum = 0;  ///< SGD and Muon
  MuonValues muon;
  /// AdamW: see state_format_of for exceptions.
  StateFormat state_dtype = StateFormat::float32;

  /// @throws Error{config} when a value is out of range.
  void validate() const;
  bool operator==(const ParameterValues&) const = default;
};

/// Values for the parameters with a matching name. Absent values, and those
/// that the factors apply to, are in ParameterRules::rest.
struct ParameterRule {
  std::string pattern = {};  ///< ECMAScript regex, searched in the names
  std::optional<Algorithm> algorithm = std::nullopt;
  double lr_mult = 1;
  double wd_mult = 1;  ///< of the weight decay
  std::optional<double> beta1 = std::nullopt;
  std::optional<double> beta2 = std::nullopt;
  std::optional<double> eps = std::nullopt;
  std::optional<double> momentum = std::nullopt;
  std::optional<StateFormat> state_dtype = std::nullopt;

  bool operator==(const ParameterRule&) const = default;
};

/// Selects the parameters that weight decay applies to.
enum class Decay {
  all,
  /// Parameters with two dimensions or more whose name does not end in "bias".
  matrices
};

}  // namespace flatshard
