#pragma once

#include "flatshard/optim/flat_update.h"
#include "flatshard/optim/flat_update_float8.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flatshard {

inline constexpr AdamWStep kSomeStep{
    .lr = 0.1F,
    .weight_decay = 0.1F,
    .beta1 = 0.9F,
    .beta2 = 0.95F,
    .eps = 1e-8F,
    .bias_correction1 = 0.1F,
    .bias_correction2 = 0.05F};

/// A shard and what its update makes in FP8.
struct Float8UpdateCase {
  std::string name;
  std::int64_t numel = 0;
  std::vector<float8::FlatRun> runs;
  std::int64_t num_amax = 0;  ///< 0: mxfp8

  PlaneWriter outputs(at::Device device) const {
    PlaneWriter all{.runs = runs};
    const at::TensorOptions there(device);
    if (num_amax > 0) {
      all.amax = at::zeros({num_amax}, there.dtype(at::kFloat));
    } else {
      all.data = at::zeros({numel + 16}, there.dtype(at::kByte));
      all.scales = at::zeros({numel / 32}, there.dtype(at::kByte));
    }
    all.upload(device);
    return all;
  }
  void expect_same(const PlaneWriter& got, const PlaneWriter& want) const {
    const auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return !b.defined() || (a.cpu().equal(b) && b.any().item<bool>());
    };
    EXPECT_TRUE(same(got.amax, want.amax));
    EXPECT_TRUE(same(got.data, want.data));
    EXPECT_TRUE(same(got.scales, want.scales));
  }
};

/// Returns runs that fill blocks of threads, share one, and leave padding
/// between them. They have rows of 48 and of 128 elements, from the middle of a
/// weight on.
inline std::vector<Float8UpdateCase> float8_update_cases() {
  std::vector<Float8UpdateCase> all;
  for (const std::int64_t rows : {4, 64, 3000}) {
    const auto at = [&](const std::string& name) {
      return name + " of " + std::to_string(rows) + " rows";
    };
    // Two weights, 16 elements of padding after each.
    const std::int64_t n = rows * 48;
    const std::int64_t m = rows * 128;
    const std::int64_t second = n + 16;
    const std::int64_t numel = (second + m + 16 + 31) / 32 * 32;
    const auto two = [&](float8::FlatRun a, float8::FlatRun b) {
      a.begin = 0;
      a.end = n;
      a.columns = 48;
      b.begin = second;
      b.end = second + m;
      b.columns = 128;
      return std::vector{a, b};
    };
    all.push_back({at("tensors"), numel, two({.amax = 1}, {.amax = 0}), 2});
    all.push_back(
        {at("rows"),
         numel,
         two({.first = 48 * 5,
              .block_rows = 1,
              .block_columns = 48,
              .amax_stride = 1},
             {.block_rows = 1,
              .block_columns = 128,
              .amax = rows + 5,
              .amax_stride = 1}),
         2 * rows + 5});
    // A weight with rows of 384, 100 rows above.
    const std::int64_t wide = (100 + rows + 127) / 128 * 4;
    all.push_back(
        {at("blocks"),
         rows * 384 + 16,
         {{.begin = 16,
           .end = 16 + rows * 384,
           .first = 100 * 384,
           .columns = 384,
           .block_rows = 128,
           .block_columns = 128,
           .amax_stride = 4}},
         wide});
    all.push_back(
        {at("mxfp8"),
         rows * 96 + 64,
         {{.begin = 0, .end = rows * 32, .columns = 32, .data = 16},
          {.begin = rows * 32 + 64,
           .end = rows * 96 + 64,
           .columns = 64,
           .data = rows * 32 + 32,
           .scales = rows}},
         0});
  }
  return all;
}

}  // namespace flatshard
