#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <memory>
#include <type_traits>

#include "flatshard/core/error.h"

// cuBLASLt's handles as values.
namespace flatshard::float8::cuda {

inline void check_cublas(cublasStatus_t status, const char* what) {
  FLATSHARD_CHECK(
      status == CUBLAS_STATUS_SUCCESS,
      cuda,
      "cuBLASLt: {} failed: {}",
      what,
      cublasLtGetStatusString(status));
}

template <class T, cublasStatus_t (*Destroy)(T*)>
struct Destroyer {
  void operator()(T* handle) const { Destroy(handle); }
};
template <class Handle, cublasStatus_t (*Destroy)(Handle)>
using Owned = std::unique_ptr<
    std::remove_pointer_t<Handle>,
    Destroyer<std::remove_pointer_t<Handle>, Destroy>>;

using MatmulDesc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using MatrixLayout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference =
    Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// sum in float32; A is transposed, B is not: both have k contiguous.
inline MatmulDesc make_desc() {
  cublasLtMatmulDesc_t made = nullptr;
  check_cublas(
      cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F),
      "making a description");
  return MatmulDesc(made);
}

template <class T>
void set(
    const MatmulDesc& desc,
    cublasLtMatmulDescAttributes_t attribute,
    const T& value) {
  check_cublas(
      cublasLtMatmulDescSetAttribute(
          desc.get(),
          attribute,
          &value,
          sizeof(value)),
      "setting an attribute");
}

/// Column-major.
inline MatrixLayout make_layout(
    cudaDataType_t type,
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t stride) {
  cublasLtMatrixLayout_t made = nullptr;
  check_cublas(
      cublasLtMatrixLayoutCreate(&made, type, rows, columns, stride),
      "making a layout");
  return MatrixLayout(made);
}

inline Preference make_preference() {
  cublasLtMatmulPreference_t made = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&made), "making a preference");
  return Preference(made);
}

template <class T>
void set(
    const Preference& preference,
    cublasLtMatmulPreferenceAttributes_t attribute,
    const T& value) {
  check_cublas(
      cublasLtMatmulPreferenceSetAttribute(
          preference.get(),
          attribute,
          &value,
          sizeof(value)),
      "setting a preference");
}

}  // namespace flatshard::float8::cuda
