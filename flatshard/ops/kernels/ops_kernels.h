#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flatshard/ops/kernels/dtype.h"

/// CUDA kernels on raw device pointers; no torch here. Every function queues on
/// `stream` and returns. The caller checks cudaGetLastError. Rows are
/// contiguous. 16-byte loads are used where pointers and row lengths allow.
namespace flatshard::nn::kernels {

/// Longest row that the rms_norm_* kernels support.
constexpr std::int64_t kMaxNormDim = 16384;

struct RmsNormForward {
  const void* x;
  const void* delta;  ///< or null: then nothing is added
  const void* weight;
  void* sum;    ///< x + delta, written when delta is given
  void* y;      ///< or null: then only sum, rstd and amax
  float* rstd;  ///< [rows]
  std::int64_t rows;
  std::int64_t dim;
  float eps;
  Dtype dtype;
  Dtype weight_dtype;
  float* amax = nullptr;  ///< or null; max(amax, largest magnitude of y)
};
void rms_norm_forward(const RmsNormForward& args, cudaStream_t stream);

struct RmsNormBackward {
  const void* dy;
  const void* dsum;  ///< or null; added to dx
  const void* x;
  const void* weight;
  const float* rstd;
  void* dx;
  void* y;  ///< or null; the forward's result once more, may be dy
  /// [blocks, dim], each block's part of the weight gradient; or null
  float* partial;
  std::int64_t blocks;
  std::int64_t rows;
  std::int64_t dim;
  Dtype dtype;
  Dtype weight_dtype;
  float* amax = nullptr;  ///< or null; max(amax, largest magnitude of dx)
};
void rms_norm_backward(const RmsNormBackward& args, cudaStream_t stream);
/// Enough of them to fill a GPU, few enough to keep the partial sums small.
int rms_norm_backward_blocks_per_multiprocessor(Dtype dtype, std::int64_t dim);

/// grad[dim] = (accumulate ? grad : 0) + sum over blocks of partial.
void sum_partials(
    const float* partial,
    void* grad,
    std::int64_t blocks,
    std::int64_t dim,
    bool accumulate,
    Dtype dtype,
    cudaStream_t stream);

struct Rope {
  const void* x;     ///< [tokens, heads, head_dim]
  void* out;         ///< may be x
  const float* cos;  ///< [seq_len, head_dim / 2]
  const float* sin;
  std::int64_t tokens;
  std::int64_t seq_len;  ///< position = token % seq_len without positions
  std::int64_t heads;
  std::int64_t head_dim;
  bool inverse;
  Dtype dtype;
  const std::int32_t* positions = nullptr;  ///< [tokens] or null
};
void rope(const Rope& args, cudaStream_t stream);

/// @param amax  or null; max(amax, largest magnitude of y).
void swiglu_forward(
    const void* gate,
    const void* up,
    void* y,
    std::int64_t numel,
    Dtype dtype,
    cudaStream_t stream,
    float* amax = nullptr);

/// @param product  or null; may be dy.
/// @param amax     or null; two: max(amax, largest magnitude) of dgate and of
///                 dup.
void swiglu_backward(
    const void* dy,
    const void* gate,
    const void* up,
    void* dgate,
    void* dup,
    void* product,
    std::int64_t numel,
    Dtype dtype,
    cudaStream_t stream,
    float* amax = nullptr);

struct CrossEntropy {
  void* logits;  ///< [rows, vocab]
  const std::int64_t* targets;
  const float* scale;  ///< one element
  float* loss;         ///< [rows], or null when lse_is_given
  float* lse;          ///< [rows]
  std::int64_t rows;
  std::int64_t vocab;
  std::int64_t ignore_index;
  bool lse_is_given;
  bool write_gradient;
  bool is_part;
  Dtype dtype;
};
void cross_entropy(const CrossEntropy& args, cudaStream_t stream);

/// table[ids[t]] += rows[order[t]] for each token t, summed in float32.
struct AddTokenRows {
  static constexpr int kPiece = 64;

  const void* rows;           ///< [tokens, dim]
  const std::int64_t* ids;    ///< [tokens], ascending
  const std::int64_t* order;  ///< [tokens]
  float* table;               ///< [table_rows, dim]
  float* pieces;              ///< [2 * ceil(tokens / kPiece), dim], scratch
  std::int64_t tokens;
  std::int64_t dim;
  std::int64_t table_rows;  ///< larger ids are skipped
  Dtype dtype;              ///< of `rows`
};
void add_token_rows(const AddTokenRows& args, cudaStream_t stream);

struct SampleDropout {
  const void* x;                ///< [rows, dim]
  const std::int64_t* samples;  ///< of each seq_len rows
  void* out;                    ///< [rows, dim]
  std::int64_t rows;
  std::int64_t dim;
  std::int64_t first_row;  ///< of x among the rows of all samples
  std::int64_t seq_len;
  std::int64_t first_column;
  std::uint64_t key;
  std::uint64_t threshold;
  float scale;
  bool adds;
  Dtype dtype;
};
void sample_dropout(const SampleDropout& args, cudaStream_t stream);

}  // namespace flatshard::nn::kernels
