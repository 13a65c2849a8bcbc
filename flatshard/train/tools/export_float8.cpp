#include "flatshard/train/tools/export_float8.h"

#include "flatshard/checkpoint/float8_blocks.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <string_view>

namespace flatshard {
namespace {

constexpr std::string_view kWeight = ".weight";

}  // namespace

void Float8Export::add(
    const SafetensorsSpec& tensor,
    const std::vector<std::string>& parameters,
    std::vector<SafetensorsSpec>& to) {
  const auto& [name, dtype, shape] = tensor;
  const bool is_linear = is_linear_of_a_block(name, shape.size());
  const bool is_excluded = std::any_of(
      parameters.begin(),
      parameters.end(),
      [&](const std::string& parameter) {
        return choice_.excludes(parameter);
      });
  if (is_linear && !is_excluded) {
    ++num_weights_;
    to.push_back({name, "F8_E4M3", shape});
    to.push_back({block_scales_name(name), "F32", block_scales_shape(shape)});
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
  return quantize_blocks(
      "--fp8: " + name,
      weight,
      "export an earlier step (--step), or export without --fp8");
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
