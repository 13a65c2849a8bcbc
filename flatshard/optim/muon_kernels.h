#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flatshard::kernels {

/// Arguments of muon_direction. Pointers may have any alignment.
struct MuonDirection {
  const void* grad = nullptr;
  bool is_bfloat16 = false;  ///< `grad`; otherwise float32
  const float* grad_scale = nullptr;
  float* buffer = nullptr;
  void* direction = nullptr;  ///< bfloat16
  float momentum = 0;
  float rest = 1;  ///< 1 - momentum
  bool nesterov = true;
  std::int64_t numel = 0;
};
void muon_direction(const MuonDirection& args, cudaStream_t stream);

/// Arguments of muon_apply.
struct MuonApply {
  float* main = nullptr;
  void* compute = nullptr;  ///< bfloat16, or null
  const void* direction = nullptr;
  float keep = 1;
  float step = 0;
  std::int64_t numel = 0;
};
void muon_apply(const MuonApply& args, cudaStream_t stream);

/// Copies the elements below the diagonal of a [rows, rows] bfloat16 matrix to
/// their mirrored places.
/// @param rows  a multiple of 64.
void mirror_lower(void* matrix, int rows, cudaStream_t stream);

}  // namespace flatshard::kernels
