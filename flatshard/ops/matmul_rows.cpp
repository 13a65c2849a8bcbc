#include "flatshard/ops/matmul_rows.h"

#include "flatshard/core/error.h"
#include "flatshard/ops/float8/known_amax.h"

namespace flatshard::nn {
float8::Quantizer MatmulRows::activations_for(float8::Recipe weights) {
  return {.recipe = float8::traits_of(weights).activations};
}

std::int64_t MatmulRows::multiple_for(float8::Recipe weights) {
  return float8::traits_of(weights).multiple;
}

MatmulRows::MatmulRows(
    Float8RowsAndColumns planes,
    float8::Recipe weights,
    const at::Tensor& like)
    : kind_(Kind::activation),
      both_(false),
      amax_(std::move(planes.amax)),
      num_rows_(like.size(0)),
      options_(like.options()) {
  const float8::Recipe recipe = activations_for(weights).recipe;
  if (planes.rows.data.defined()) {
    row_ = {std::move(planes.rows), recipe};
  }
  if (planes.columns.data.defined()) {
    column_ = {std::move(planes.columns), recipe};
  }
}

float8::Quantizer MatmulRows::quantizer(float8::Recipe weights) const {
  float8::Quantizer q = activations_for(weights);
  if (kind_ == Kind::gradient) {
    q.format = float8::traits_of(weights).gradient;
  }
  return q;
}

const at::Tensor& MatmulRows::amax_for(const float8::Quantizer& q) const {
  static const at::Tensor none;
  FLATSHARD_CHECK(
      rows_.defined(),
      internal,
      "rows that were quantized as {} have no other plane",
      float8::to_string(q.recipe));
  if (!float8::traits_of(q.recipe).has_one_scale() || rows_.numel() == 0) {
    return none;
  }
  if (!amax_.defined() && kind_ == Kind::gradient) {
    amax_ = take_known_amax(rows_);
  }
  if (!amax_.defined()) {
    amax_ = float8::amax_of(rows_);
  }
  return amax_;
}

void MatmulRows::quantize_both(const float8::Quantizer& q) const {
  auto [row, column] = float8::quantize_both(
      rows_,
      q,
      float8::traits_of(q.recipe).multiple,
      amax_for(q));
  row_ = {std::move(row), q.recipe};
  column_ = {std::move(column), q.recipe};
  if (kind_ == Kind::gradient) {
    rows_.reset();
  }
}

const float8::Operand& MatmulRows::row(float8::Recipe weights) const {
  const float8::Quantizer q = quantizer(weights);
  if (row_ && row_->recipe == q.recipe) {
    return *row_;
  }
  if (both_) {
    quantize_both(q);
  } else {
    row_ = {float8::quantize(rows_, q, {.amax = amax_for(q)}), q.recipe};
  }
  return *row_;
}

const float8::Operand& MatmulRows::column(float8::Recipe weights) const {
  const float8::Quantizer q = quantizer(weights);
  if (column_ && column_->recipe == q.recipe) {
    return *column_;
  }
  if (both_) {
    quantize_both(q);
  } else {
    column_ = {
        float8::quantize(
            rows_,
            q,
            {.axis = float8::Axis::column,
             .multiple = float8::traits_of(q.recipe).multiple,
             .amax = amax_for(q)}),
        q.recipe};
  }
  return *column_;
}

}  // namespace flatshard::nn
