#include "flatshard/float8/kernels/codec.cuh"

#include "flatshard/core/rounding.h"

namespace flatshard::float8::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;

// ----------------------------------------------------------------- transpose

// Loads sixteen bytes; only `num` of them exist.
__device__ inline uint4
load_bytes(const std::uint8_t* from, std::int64_t num, bool wide) {
  if (wide && num >= 16) {
    return *reinterpret_cast<const uint4*>(from);
  }
  std::uint32_t w[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < num) {
      w[i / 4] |= static_cast<std::uint32_t>(from[i]) << (i % 4 * 8);
    }
  }
  return {w[0], w[1], w[2], w[3]};
}

// Byte j of each of four words.
template <int J>
__device__ inline std::uint32_t byte_of_each(
    std::uint32_t a,
    std::uint32_t b,
    std::uint32_t c,
    std::uint32_t d) {
  constexpr unsigned kPick = J | (J + 4) << 4;
  return __byte_perm(
      __byte_perm(a, b, kPick),
      __byte_perm(c, d, kPick),
      0x5410);
}

// A thread has 4 rows of 16 bytes. In shared memory words of 4 bytes (rows of
// one column) are permuted by their columns' group, against bank conflicts.
__global__ void __launch_bounds__(kThreads) transpose_kernel(
    const std::uint8_t* data,
    std::uint8_t* out,
    std::int64_t rows,
    std::int64_t columns) {
  __shared__ alignas(16) std::uint32_t tile[kTile][kTile / 4];
  const int group = threadIdx.x % 8;  // of 16 columns
  const int quad = threadIdx.x / 8;   // of 4 rows
  const std::int64_t c = std::int64_t{blockIdx.x} * kTile + group * 16;
  const std::int64_t r = std::int64_t{blockIdx.y} * kTile + quad * 4;
  const bool wide_in = columns % 16 == 0 && aligned16(data);
  const bool wide_out = rows % 16 == 0 && aligned16(out);
  uint4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = load_bytes(
        data + (r + i) * columns + c,
        r + i < rows ? columns - c : 0,
        wide_in);
  }
  const int word = quad ^ group * 4;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const auto of = [&](const uint4& row) {
      return k == 0 ? row.x : k == 1 ? row.y : k == 2 ? row.z : row.w;
    };
    const std::uint32_t w0 = of(v[0]), w1 = of(v[1]), w2 = of(v[2]),
                        w3 = of(v[3]);
    const int column = group * 16 + k * 4;
    tile[column][word] = byte_of_each<0>(w0, w1, w2, w3);
    tile[column + 1][word] = byte_of_each<1>(w0, w1, w2, w3);
    tile[column + 2][word] = byte_of_each<2>(w0, w1, w2, w3);
    tile[column + 3][word] = byte_of_each<3>(w0, w1, w2, w3);
  }
  __syncthreads();
  const int chunk = threadIdx.x % 8;  // of 16 rows
  const std::int64_t to_row = std::int64_t{blockIdx.y} * kTile + chunk * 16;
#pragma unroll
  for (int pass = 0; pass < kTile / 32; ++pass) {
    const int column = pass * 32 + threadIdx.x / 8;
    const std::int64_t to_column = std::int64_t{blockIdx.x} * kTile + column;
    if (to_column >= columns || to_row >= rows) {
      continue;
    }
    const uint4 codes = *reinterpret_cast<const uint4*>(
        &tile[column][(chunk ^ column / 16) * 4]);
    std::uint8_t* to = out + to_column * rows + to_row;
    if (wide_out) {
      *reinterpret_cast<uint4*>(to) = codes;
      continue;
    }
    const std::uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (to_row + i < rows) {
        to[i] = static_cast<std::uint8_t>(w[i / 4] >> (i % 4 * 8));
      }
    }
  }
}

// ------------------------------------------------------------------- swizzle

// A thread moves four scales of a row; beyond the tensor are zeros.
__global__ void __launch_bounds__(kThreads) swizzle_kernel(
    const std::uint8_t* scales,
    std::uint8_t* out,
    std::int64_t outer,
    std::int64_t blocks,
    std::int64_t tiles_across) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t quad = i % tiles_across;
  const std::int64_t r = i / tiles_across;
  if (r >= (outer + 127) / 128 * 128) {
    return;
  }
  const std::uint8_t* from = scales + r * blocks + quad * 4;
  std::uint32_t word = 0;
  if (r < outer) {
    if (blocks % 4 == 0 && aligned(scales, 4)) {
      word = *reinterpret_cast<const std::uint32_t*>(from);
    } else {
      for (int b = 0; b < 4 && quad * 4 + b < blocks; ++b) {
        word |= static_cast<std::uint32_t>(from[b]) << (b * 8);
      }
    }
  }
  const std::int64_t to =
      (r / 128 * tiles_across + quad) * 512 + r % 32 * 16 + r % 128 / 32 * 4;
  *reinterpret_cast<std::uint32_t*>(out + to) = word;
}

// ---------------------------------------------------------------- dequantize

// Sixteen codes of a row.
template <class T, Format F>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const Dequantize a) {
  const std::int64_t runs = (a.columns + 15) / 16;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t r = i / runs;
  const std::int64_t c = i % runs * 16;
  if (r >= a.rows) {
    return;
  }
  const std::int64_t at = r * a.columns + c;
  const std::int64_t num = a.columns - c;
  const bool wide = a.columns % 16 == 0 && aligned16(a.data);
  const uint4 raw = load_bytes(a.data + at, num, wide);
  const std::uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
  const auto scale_at = [&](std::int64_t column) {
    const std::int64_t s = r / a.block_rows * a.scale_row_stride +
                           column / a.block_columns * a.scale_column_stride;
    return a.e8m0 ? decode_e8m0(static_cast<const std::uint8_t*>(a.scales)[s])
                  : static_cast<const float*>(a.scales)[s];
  };
  const bool one_scale =
      a.block_columns % 16 == 0 || a.block_columns >= a.columns;
  const float scale = one_scale ? scale_at(c) : 0.0F;
  float v[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 pair = decode2<F>(w[j / 2] >> (j % 2 * 16));
    v[2 * j] = pair.x;
    v[2 * j + 1] = pair.y;
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    v[j] *= one_scale ? scale : (j < num ? scale_at(c + j) : 0.0F);
  }
  T* out = static_cast<T*>(a.out) + at;
  if (wide) {
    Eight<T> run;
    run.set({v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]});
    *reinterpret_cast<Eight<T>*>(out) = run;
    run.set({v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]});
    *reinterpret_cast<Eight<T>*>(out + 8) = run;
    return;
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j < num) {
      out[j] = flatshard::kernels::from_float<T>(v[j]);
    }
  }
}

}  // namespace

void transpose_bytes(
    const std::uint8_t* data,
    std::uint8_t* out,
    std::int64_t rows,
    std::int64_t columns,
    cudaStream_t stream) {
  const dim3 grid(
      static_cast<unsigned>(ceil_div(columns, kTile)),
      static_cast<unsigned>(ceil_div(rows, kTile)));
  transpose_kernel<<<grid, kThreads, 0, stream>>>(data, out, rows, columns);
}

void swizzle_mx_scales(
    const std::uint8_t* scales,
    std::uint8_t* out,
    std::int64_t outer,
    std::int64_t blocks,
    cudaStream_t stream) {
  const std::int64_t across = ceil_div(blocks, 4);
  const std::int64_t words = ceil_div(outer, 128) * 128 * across;
  swizzle_kernel<<<
      static_cast<unsigned>(ceil_div(words, kThreads)),
      kThreads,
      0,
      stream>>>(scales, out, outer, blocks, across);
}

void dequantize(const Dequantize& a, cudaStream_t stream) {
  const std::int64_t runs = ceil_div(a.columns, 16) * a.rows;
  const auto grid = static_cast<unsigned>(ceil_div(runs, kThreads));
  const auto run = [&]<class T>(T) {
    if (a.format == Format::e4m3) {
      dequantize_kernel<T, Format::e4m3><<<grid, kThreads, 0, stream>>>(a);
    } else {
      dequantize_kernel<T, Format::e5m2><<<grid, kThreads, 0, stream>>>(a);
    }
  };
  a.dtype == Dtype::f32 ? run(float{}) : run(__nv_bfloat16{});
}

}  // namespace flatshard::float8::kernels
