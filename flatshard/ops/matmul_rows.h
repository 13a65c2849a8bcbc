#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/float8/float8_matmul.h"
#include "flatshard/ops/float8/float8_fused.h"

#include <optional>
#include <utility>

namespace flatshard::nn {

/// The common operand of several matmuls of one node, in addition to their
/// weights: activations, or their gradient. A plane that is quantized for one
/// matmul is reused by all others.
class MatmulRows {
 public:
  enum class Kind { activation, gradient };

  /// @param rows  [rows, n]
  /// @param both  row() and column() will be called: one pass computes both
  ///   and then frees the values of a gradient.
  /// @param amax  [] float32, the largest magnitude when it is known.
  explicit MatmulRows(
      at::Tensor rows,
      Kind kind = Kind::activation,
      bool both = false,
      at::Tensor amax = {})
      : rows_(std::move(rows)),
        kind_(kind),
        both_(both),
        amax_(std::move(amax)),
        num_rows_(rows_.defined() ? rows_.size(0) : 0),
        options_(rows_.defined() ? rows_.options() : at::TensorOptions()) {}

  /// Activations that were quantized where they were computed: there are only
  /// these planes of them.
  /// @param weights  the recipe of all weights that they are multiplied by.
  /// @param like     a tensor [rows, ...] of their dtype.
  MatmulRows(
      Float8RowsAndColumns planes,
      float8::Recipe weights,
      const at::Tensor& like);
  /// Returns how activations become planes for weights of a recipe.
  static float8::Quantizer activations_for(float8::Recipe weights);
  /// Returns the divisor of a plane that sums over rows.
  static std::int64_t multiple_for(float8::Recipe weights);

  /// Undefined where there are only planes.
  const at::Tensor& tensor() const { return rows_; }
  std::int64_t num_rows() const { return num_rows_; }
  at::TensorOptions options() const { return options_; }
  /// [rows, n], for matmuls that sum over n.
  /// @param weights  the recipe of the weight it is multiplied by.
  const float8::Operand& row(float8::Recipe weights) const;
  /// [n, rows], padded with zeros, for matmuls that sum over the rows.
  const float8::Operand& column(float8::Recipe weights) const;
  /// Returns the largest magnitude, once a tensorwise plane was made; else
  /// undefined.
  const at::Tensor& amax() const { return amax_; }

 private:
  float8::Quantizer quantizer(float8::Recipe weights) const;
  const at::Tensor& amax_for(const float8::Quantizer& q) const;
  void quantize_both(const float8::Quantizer& q) const;

  mutable at::Tensor rows_;
  Kind kind_;
  bool both_;
  mutable at::Tensor amax_;
  std::int64_t num_rows_ = 0;
  at::TensorOptions options_;
  mutable std::optional<float8::Operand> row_;
  mutable std::optional<float8::Operand> column_;
};

}  // namespace flatshard::nn
