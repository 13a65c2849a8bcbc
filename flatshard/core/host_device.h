#pragma once

/// Before a function that CPUs and, in a .cu file, GPUs run.
#ifdef __CUDACC__
#define FLATSHARD_HOST_DEVICE __host__ __device__
#else
#define FLATSHARD_HOST_DEVICE
#endif
