#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/float8/matmul.h"

#include <optional>
#include <utility>

namespace flatshard::nn {

/// What several products of one node read besides their weights: activations,
/// or their gradient. What is quantized of it for one product serves the
/// others.
class MatmulRows {
 public:
  enum class Kind { activation, gradient };

  /// @param rows  [rows, n]
  /// @param both  row() and column() will be asked for: one reading makes both.
  explicit MatmulRows(
      at::Tensor rows,
      Kind kind = Kind::activation,
      bool both = false)
      : rows_(std::move(rows)), kind_(kind), both_(both) {}

  const at::Tensor& tensor() const { return rows_; }
  /// [rows, n], for products that sum over n.
  /// @param weights  the recipe of the weight it is multiplied by.
  const float8::Operand& row(float8::Recipe weights) const;
  /// [n, rows], filled up with zeros, for products that sum over the rows.
  const float8::Operand& column(float8::Recipe weights) const;

 private:
  float8::Quantizer quantizer(float8::Recipe weights) const;
  void quantize_both(const float8::Quantizer& q) const;

  at::Tensor rows_;
  Kind kind_;
  bool both_;
  mutable std::optional<float8::Operand> row_;
  mutable std::optional<float8::Operand> column_;
};

}  // namespace flatshard::nn
