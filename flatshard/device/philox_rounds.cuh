#pragma once

#include <cstdint>

namespace flatshard::kernels {

/// Replaces a counter by its four words. Philox4x32-10, as core/philox.h has
/// it.
__device__ inline void philox(uint4& c, std::uint32_t k0, std::uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t hi0 = __umulhi(0xD2511F53U, c.x);
    const std::uint32_t lo0 = 0xD2511F53U * c.x;
    const std::uint32_t hi1 = __umulhi(0xCD9E8D57U, c.z);
    const std::uint32_t lo1 = 0xCD9E8D57U * c.z;
    c = {hi1 ^ c.y ^ k0, lo1, hi0 ^ c.w ^ k1, lo0};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
}

}  // namespace flatshard::kernels
