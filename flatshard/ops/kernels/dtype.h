#pragma once

namespace flatshard::nn::kernels {

/// The dtypes of rows that the kernels support.
enum class Dtype { f32, bf16 };

}  // namespace flatshard::nn::kernels
