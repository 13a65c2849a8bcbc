#pragma once

#include <ATen/core/Tensor.h>

#include "flatshard/layout/placement.h"

namespace flatshard {

/// out = rows added in their order; `avg` multiplies by 1 / size, `max` returns
/// the largest instead. float16 and bfloat16 add up in float32 and round once.
/// On the current stream.
///
/// @param out   [n]. CUDA: float32, bfloat16 or float16.
/// @param rows  [size, n] same dtype; each row is contiguous.
void sum_rows(const at::Tensor& out, const at::Tensor& rows, ReduceOp op);
/// Does not read row `rank`: `own`, [n] of the same dtype, replaces it.
void sum_rows(
    const at::Tensor& out,
    const at::Tensor& rows,
    int rank,
    const at::Tensor& own,
    ReduceOp op);

/// into = scale * from, or into + scale * from, as at::Tensor::add_ rounds it.
/// On the current stream. On CUDA, contiguous tensors with a float32 `into` and
/// a float32, bfloat16 or float16 `from` need one pass at memory bandwidth.
/// ATen's kernel for two dtypes does not reach it.
///
/// @param into  [n]
/// @param from  [n], of any dtype
void add_scaled(
    const at::Tensor& into,
    const at::Tensor& from,
    double scale,
    bool add);

}  // namespace flatshard
