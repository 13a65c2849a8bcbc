#include "flatshard/plan/gpu.h"

#include "flatshard/core/error.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace flatshard::plan {
namespace {

constexpr double kTera = 1e12;
constexpr double kGiga = 1e9;

/// Position of a size between two entries of an axis.
struct Place {
  std::size_t low = 0;
  std::size_t high = 0;
  double weight = 0;  ///< weight of `high`
  double scale = 1;   ///< factor of the rate, below the axis
};

Place place_on(const std::vector<double>& axis, double size) {
  const auto above = std::lower_bound(axis.begin(), axis.end(), size);
  if (above == axis.begin()) {
    return {.scale = size / axis.front()};
  }
  const auto high = static_cast<std::size_t>(above - axis.begin());
  if (above == axis.end()) {
    return {.low = high - 1, .high = high - 1};
  }
  return {
      .low = high - 1,
      .high = high,
      .weight = std::log(size / axis[high - 1]) /
                std::log(axis[high] / axis[high - 1])};
}

const ProductRates& rates_of(
    const std::map<std::string, ProductRates>& float8,
    std::string_view recipe,
    const std::string& gpu) {
  const auto found = float8.find(std::string(recipe));
  FLATSHARD_CHECK(
      found != float8.end(),
      config,
      "{} has no rates of the FP8 recipe {}; calibrate on a GPU that supports "
      "it, or use another recipe",
      gpu,
      recipe);
  return found->second;
}

}  // namespace

std::string_view to_string(Product product) {
  switch (product) {
    case Product::forward:
      return "forward";
    case Product::dgrad:
      return "dgrad";
    case Product::wgrad:
      return "wgrad";
  }
  return "unknown";
}

double Curve::at(double size) const {
  const Place p = place_on(sizes, size);
  return p.scale * (rates[p.low] + p.weight * (rates[p.high] - rates[p.low]));
}

double ProductRates::at(double rows, double columns, double inner) const {
  const std::array<Place, 3> places{
      place_on(m, rows),
      place_on(n, columns),
      place_on(k, inner)};
  double sum = 0;
  for (int corner = 0; corner < 8; ++corner) {
    double weight = 1;
    std::array<std::size_t, 3> index{};
    for (int axis = 0; axis < 3; ++axis) {
      const Place& p = places[axis];
      const bool high = (corner >> axis & 1) != 0;
      index[axis] = high ? p.high : p.low;
      weight *= high ? p.weight : 1 - p.weight;
    }
    if (weight > 0) {
      sum += weight *
             tflops[(index[0] * n.size() + index[1]) * k.size() + index[2]];
    }
  }
  return sum * places[0].scale * places[1].scale * places[2].scale;
}

std::string_view table_of_device(std::string_view device_name) {
  const auto has = [&](std::string_view word) {
    return device_name.find(word) != std::string_view::npos;
  };
  if (has("MIG") || has("PCIe") || has("NVL")) {
    return {};
  }
  for (const auto& [word, table] :
       {std::pair<std::string_view, std::string_view>{"H100", "h100"},
        {"H200", "h200"},
        {"B200", "b200"},
        {"A100", "a100"}}) {
    // GB200 and the like are other GPUs.
    if (has(fmt::format(" {}", word))) {
      return table;
    }
  }
  return {};
}

double attention_flops(
    bool backward,
    double sequences,
    double heads,
    double seq_len,
    double head_dim) {
  const double product = sequences * heads * seq_len * seq_len * head_dim;
  return (backward ? 5 : 2) * product;
}

double Gpu::product_seconds(
    Product product,
    double m,
    double n,
    double k,
    std::string_view recipe) const {
  const ProductRates& rates = recipe.empty()
                                  ? products[static_cast<std::size_t>(product)]
                                  : rates_of(float8, recipe, name);
  return 2 * m * n * k / (rates.at(m, n, k) * kTera);
}

double Gpu::grouped_seconds(
    Product product,
    double groups,
    double m,
    double n,
    double k) const {
  const ProductRates& rates = grouped[static_cast<std::size_t>(product)];
  return 2 * groups * m * n * k / (rates.at(m, n, k) * kTera);
}

double Gpu::attention_seconds(
    bool backward,
    double sequences,
    double heads,
    double seq_len,
    std::int64_t head_dim) const {
  // The nearest width that was measured.
  const auto nearest =
      std::ranges::min_element(attention, {}, [&](const auto& row) {
        return std::abs(std::log(
            static_cast<double>(row.first) / static_cast<double>(head_dim)));
      });
  const Curve& curve =
      backward ? nearest->second.backward : nearest->second.forward;
  return attention_flops(
             backward,
             sequences,
             heads,
             seq_len,
             static_cast<double>(head_dim)) /
         (curve.at(seq_len) * kTera);
}

double Gpu::pass_seconds(std::string_view kind, double nbytes) const {
  const auto found = passes.find(std::string(kind));
  FLATSHARD_CHECK(
      found != passes.end(),
      internal,
      "expected a kind of pass, one of {}, got {}",
      fmt::join(kPasses, ", "),
      kind);
  return nbytes / (found->second * kGiga) + launch_us * 1e-6;
}

}  // namespace flatshard::plan
