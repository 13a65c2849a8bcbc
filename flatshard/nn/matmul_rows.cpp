#include "flatshard/nn/matmul_rows.h"

namespace flatshard::nn {
namespace {

// Tokens that a sum over them is filled up to.
std::int64_t multiple_of(float8::Recipe activations) {
  switch (activations) {
    case float8::Recipe::blockwise_1x128:
      return float8::kBlock;
    case float8::Recipe::mxfp8:
      return float8::kMxBlock;
    default:
      return 16;
  }
}

}  // namespace

float8::Quantizer MatmulRows::quantizer(float8::Recipe weights) const {
  // Gradients need range more than precision where one scale serves all.
  const bool wide =
      kind_ == Kind::gradient && weights == float8::Recipe::tensorwise;
  return {
      .recipe = weights == float8::Recipe::blockwise
                    ? float8::Recipe::blockwise_1x128
                    : weights,
      .format = wide ? float8::Format::e5m2 : float8::Format::e4m3};
}

void MatmulRows::quantize_both(const float8::Quantizer& q) const {
  auto [row, column] = float8::quantize_both(rows_, q, multiple_of(q.recipe));
  row_ = {std::move(row), q.recipe};
  column_ = {std::move(column), q.recipe};
}

const float8::Operand& MatmulRows::row(float8::Recipe weights) const {
  const float8::Quantizer q = quantizer(weights);
  if (row_ && row_->recipe == q.recipe) {
    return *row_;
  }
  if (both_) {
    quantize_both(q);
  } else {
    row_ = {float8::quantize(rows_, q), q.recipe};
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
            {.axis = float8::Axis::column, .multiple = multiple_of(q.recipe)}),
        q.recipe};
  }
  return *column_;
}

}  // namespace flatshard::nn
