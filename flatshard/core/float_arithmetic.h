#pragma once

#include <cmath>

#include "flatshard/core/host_device.h"

/// Inlined into loops that are compiled with other options, too.
#define FLATSHARD_ARITHMETIC \
  FLATSHARD_HOST_DEVICE __attribute__((always_inline)) inline

/// Operations that round one by one on GPUs, as on a CPU. Otherwise
/// nvcc would contract multiply-adds depending on the rest of a kernel, and the
/// same numbers would round differently.
namespace flatshard::float_arithmetic {

FLATSHARD_ARITHMETIC float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

FLATSHARD_ARITHMETIC float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

FLATSHARD_ARITHMETIC float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

FLATSHARD_ARITHMETIC float square_root(float a) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}

FLATSHARD_ARITHMETIC double times(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

FLATSHARD_ARITHMETIC double plus(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

FLATSHARD_ARITHMETIC double divide(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

}  // namespace flatshard::float_arithmetic
