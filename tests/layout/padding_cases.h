#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "flatshard/core/error.h"
#include "flatshard/layout/flat_layout.h"

namespace flatshard::padding {

/// The parameters of one unit of a known model.
struct PaddingCase {
  std::string name;
  std::vector<std::vector<std::int64_t>> shapes;

  std::vector<TensorSpec> specs(Granularity granularity) const {
    std::vector<TensorSpec> specs;
    for (const auto& shape : shapes) {
      specs.push_back(
          {fmt::format("parameter{}", specs.size()), shape, granularity});
    }
    return specs;
  }
};

inline const std::vector<std::int64_t> kPaddingRanks = {8, 64, 512, 4096};

/// Returns one decoder layer: q, k, v, o, gate, up, down and two norms. Sizes:
/// The Llama 3 Herd of Models, arXiv:2407.21783, table 3.
inline PaddingCase llama_layer(
    std::string name,
    std::int64_t dim,
    std::int64_t ffn,
    std::int64_t kv) {
  return {
      std::move(name),
      {{dim, dim},
       {kv, dim},
       {kv, dim},
       {dim, dim},
       {ffn, dim},
       {ffn, dim},
       {dim, ffn},
       {dim},
       {dim}}};
}

/// Sizes: DeepSeek-V3 Technical Report, arXiv:2412.19437, section 4.2.
inline std::vector<PaddingCase> padding_cases() {
  const std::vector<std::vector<std::int64_t>> attention = {
      {1536, 7168},   // q_a
      {1536},         // its norm
      {24576, 1536},  // q_b
      {576, 7168},    // kv_a
      {512},          // its norm
      {32768, 512},   // kv_b
      {7168, 16384},  // o
      {7168},
      {7168}};
  const auto with = [&](std::vector<std::vector<std::int64_t>> more) {
    std::vector<std::vector<std::int64_t>> shapes = attention;
    shapes.insert(shapes.end(), more.begin(), more.end());
    return shapes;
  };
  return {
      llama_layer("Llama-3 8B layer", 4096, 14336, 1024),
      llama_layer("Llama-3 70B layer", 8192, 28672, 1024),
      llama_layer("Llama-3 405B layer", 16384, 53248, 1024),
      {"DeepSeek-V3 attention (MLA)", attention},
      {"DeepSeek-V3 dense layer",
       with({{18432, 7168}, {18432, 7168}, {7168, 18432}})},
      {"DeepSeek-V3 MoE layer without routed experts",
       with(
           {{256, 7168},  // router and its bias
            {256},
            {2048, 7168},  // shared expert
            {2048, 7168},
            {7168, 2048}})},
      {"DeepSeek-V3 256 routed experts",
       {{256, 2048, 7168}, {256, 2048, 7168}, {256, 7168, 2048}}}};
}

/// Padding relative to data in FSDP2. It pads dim 0 of each parameter to a
/// multiple of the ranks.
inline double per_parameter_padding(
    const PaddingCase& unit,
    std::int64_t ranks) {
  double data = 0;
  double padded = 0;
  for (const auto& shape : unit.shapes) {
    double width = 1;
    for (std::size_t dim = 1; dim < shape.size(); ++dim) {
      width *= static_cast<double>(shape[dim]);
    }
    const std::int64_t rows = (shape[0] + ranks - 1) / ranks * ranks;
    data += width * static_cast<double>(shape[0]);
    padded += width * static_cast<double>(rows);
  }
  return padded / data - 1;
}

/// sum(distinct row widths) * ranks / data: row granularity pads at most that.
/// A width counts as its least common multiple with the alignment.
inline double row_bound(const PaddingCase& unit, std::int64_t ranks) {
  std::set<std::int64_t> granules;
  double data = 0;
  for (const auto& shape : unit.shapes) {
    granules.insert(std::lcm(row_width(shape), kLayoutAlignment));
    data += static_cast<double>(std::accumulate(
        shape.begin(),
        shape.end(),
        std::int64_t{1},
        std::multiplies<>()));
  }
  return static_cast<double>(ranks) *
         static_cast<double>(std::accumulate(
             granules.begin(),
             granules.end(),
             std::int64_t{0})) /
         data;
}

inline FlatLayout layout_of(
    const PaddingCase& unit,
    Granularity granularity,
    std::int64_t ranks) {
  return FlatLayout::build(unit.specs(granularity), ranks);
}

}  // namespace flatshard::padding
