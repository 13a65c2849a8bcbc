#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flatshard/optim/optim_kernels.h"

// Parts of the kernels that update flat shards.
namespace flatshard::kernels {

constexpr int kThreads = 256;
constexpr int kVector = 4;

// Four values as float, whatever their dtype, with one load.
template <class T>
__device__ float4 load4(const void* from, std::int64_t i);
template <>
inline __device__ float4 load4<float>(const void* from, std::int64_t i) {
  return reinterpret_cast<const float4*>(from)[i];
}
template <>
inline __device__ float4
load4<__nv_bfloat16>(const void* from, std::int64_t i) {
  const uint2 raw = reinterpret_cast<const uint2*>(from)[i];
  const auto lo = *reinterpret_cast<const __nv_bfloat162*>(&raw.x);
  const auto hi = *reinterpret_cast<const __nv_bfloat162*>(&raw.y);
  const float2 a = __bfloat1622float2(lo);
  const float2 b = __bfloat1622float2(hi);
  return {a.x, a.y, b.x, b.y};
}
template <>
inline __device__ float4 load4<__half>(const void* from, std::int64_t i) {
  const uint2 raw = reinterpret_cast<const uint2*>(from)[i];
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return {a.x, a.y, b.x, b.y};
}

struct NoCompute {};

template <class T>
__device__ void store4(void* to, std::int64_t i, float4 v);
template <>
inline __device__ void store4<NoCompute>(void*, std::int64_t, float4) {
}
template <>
inline __device__ void store4<float>(void* to, std::int64_t i, float4 v) {
  reinterpret_cast<float4*>(to)[i] = v;
}
template <>
inline __device__ void
store4<__nv_bfloat16>(void* to, std::int64_t i, float4 v) {
  const __nv_bfloat162 lo = __floats2bfloat162_rn(v.x, v.y);
  const __nv_bfloat162 hi = __floats2bfloat162_rn(v.z, v.w);
  reinterpret_cast<uint2*>(to)[i] = {
      *reinterpret_cast<const unsigned*>(&lo),
      *reinterpret_cast<const unsigned*>(&hi)};
}
template <>
inline __device__ void store4<__half>(void* to, std::int64_t i, float4 v) {
  const __half2 lo = __floats2half2_rn(v.x, v.y);
  const __half2 hi = __floats2half2_rn(v.z, v.w);
  reinterpret_cast<uint2*>(to)[i] = {
      *reinterpret_cast<const unsigned*>(&lo),
      *reinterpret_cast<const unsigned*>(&hi)};
}

// Returns the range that element i is in: ranges are few, so a search stays in
// cache.
template <class Range>
__device__ int range_of(const Range* ranges, int num_ranges, std::int64_t i) {
  int low = 0;
  int high = num_ranges - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ranges[middle].end <= i) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Four elements of one row.
template <class Rule>
__device__ void
update4(const UpdateRow& row, float4& w, float4 g, float4& a, float4& b) {
  Rule::update(row, w.x, g.x, a.x, b.x);
  Rule::update(row, w.y, g.y, a.y, b.y);
  Rule::update(row, w.z, g.z, a.z, b.z);
  Rule::update(row, w.w, g.w, a.w, b.w);
}

// One element by the row of its range.
template <class Rule>
__device__ void update_by_range(
    const FlatUpdatePointers& p,
    std::int64_t i,
    float& w,
    float g,
    float& a,
    float& b) {
  const int group = p.ranges[range_of(p.ranges, p.num_ranges, i)].group;
  if (group != UpdateRange::kSkipped) {
    Rule::update(p.rows[group], w, g, a, b);
  }
}

}  // namespace flatshard::kernels
