#include "flatshard/train/export/export_float8.h"

#include "flatshard/core/error.h"
#include "flatshard/float8/quantize.h"
#include "flatshard/models/hf_names.h"

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <string_view>

namespace flatshard {
namespace {

constexpr std::string_view kWeight = ".weight";

std::int64_t blocks_of(std::int64_t n) {
  return (n + float8::kBlock - 1) / float8::kBlock;
}

bool is_linear_of_a_block(std::string_view name) {
  return name.find(".layers.") != std::string_view::npos &&
         name.ends_with("_proj.weight");
}

}  // namespace

void Float8Export::add(
    const std::string& name,
    const std::vector<std::int64_t>& shape,
    std::vector<SafetensorsSpec>& to) {
  const std::string hf_name = models::to_hf_name(name);
  const bool is_linear = is_linear_of_a_block(name) && shape.size() == 2;
  if (is_linear && !choice_.excludes(name)) {
    ++num_weights_;
    to.push_back({hf_name, "F8_E4M3", shape});
    to.push_back(
        {scales_name(hf_name),
         "F32",
         {blocks_of(shape[0]), blocks_of(shape[1])}});
    return;
  }
  if (is_linear) {
    kept_.push_back(hf_name.substr(0, hf_name.size() - kWeight.size()));
  }
  to.push_back({hf_name, "BF16", shape});
}

Float8Export::Blocks Float8Export::quantize(
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
      "--fp8: {} has values that are not finite, which no FP8 scale fits; "
      "export an earlier step (--step), or without --fp8",
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
    // A list takes the place of transformers' own, which is the head.
    auto& names = quantization["modules_to_not_convert"];
    names = kept_;
    names.push_back("lm_head");
  }
  return json.dump(2) + "\n";
}

}  // namespace flatshard
