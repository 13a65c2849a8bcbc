#include "flatshard/train/tools/export_float8.h"

#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/float8/quantize.h"

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string_view>

namespace flatshard {
namespace {

constexpr std::string_view kWeight = ".weight";

std::int64_t blocks_of(std::int64_t n) {
  return ceil_div(n, float8::kBlock);
}

bool is_linear_of_a_block(std::string_view name) {
  return name.find(".layers.") != std::string_view::npos &&
         name.ends_with("_proj.weight");
}

}  // namespace

void Float8Export::add(
    const SafetensorsSpec& tensor,
    const std::vector<std::string>& parameters,
    std::vector<SafetensorsSpec>& to) {
  const auto& [name, dtype, shape] = tensor;
  const bool is_linear = is_linear_of_a_block(name) && shape.size() == 2;
  const bool is_excluded = std::any_of(
      parameters.begin(),
      parameters.end(),
      [&](const std::string& parameter) {
        return choice_.excludes(parameter);
      });
  if (is_linear && !is_excluded) {
    ++num_weights_;
    to.push_back({name, "F8_E4M3", shape});
    to.push_back(
        {scales_name(name), "F32", {blocks_of(shape[0]), blocks_of(shape[1])}});
    return;
  }
  if (is_linear) {
    kept_.push_back(name.substr(0, name.size() - kWeight.size()));
  }
  to.push_back({name, "BF16", shape});
}

float8::Plane Float8Export::quantize(
    const std::string& name,
    const at::Tensor& weight) {
  const std::int64_t rows = weight.size(0);
  const std::int64_t columns = weight.size(1);
  // Zeros change no block's largest magnitude.
  const at::Tensor whole = at::constant_pad_nd(
      weight.to(at::kFloat),
      {0,
       blocks_of(columns) * float8::kBlock - columns,
       0,
       blocks_of(rows) * float8::kBlock - rows});
  const float8::Plane plane =
      float8::quantize(whole, {.recipe = float8::Recipe::blockwise});
  FLATSHARD_CHECK(
      plane.scales.isfinite().all().item<bool>(),
      config,
      "--fp8: {} has values that are not finite, and no FP8 scale fits them; "
      "export an earlier step (--step), or export without --fp8",
      name);
  return {
      plane.data.narrow(0, 0, rows).narrow(1, 0, columns).contiguous(),
      plane.scales.contiguous()};
}

std::string Float8Export::with_quantization(
    const std::string& config_json) const {
  auto json = nlohmann::ordered_json::parse(config_json);
  nlohmann::ordered_json& quantization = json["quantization_config"];
  quantization = {
      {"activation_scheme", "dynamic"},
      {"fmt", "e4m3"},
      {"quant_method", "fp8"},
      {"weight_block_size", {float8::kBlock, float8::kBlock}}};
  if (!kept_.empty()) {
    // A list replaces the default of transformers, and that is the head.
    auto& names = quantization["modules_to_not_convert"];
    names = kept_;
    names.push_back("lm_head");
  }
  return json.dump(2) + "\n";
}

}  // namespace flatshard
