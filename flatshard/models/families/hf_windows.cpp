#include "flatshard/models/families/hf_windows.h"

#include <algorithm>
#include <string>
#include <vector>

namespace flatshard::models {
namespace {

constexpr const char* kFull = "full_attention";
constexpr const char* kSliding = "sliding_attention";

// Returns the shortest pattern that repeats to `windows`; empty: all have one.
std::vector<bool> pattern_of(const std::vector<bool>& windows) {
  if (std::find(windows.begin(), windows.end(), false) == windows.end()) {
    return {};
  }
  const std::size_t size = windows.size();
  std::size_t period = 1;
  const auto repeats = [&] {
    for (std::size_t i = period; i < size; ++i) {
      if (windows[i] != windows[i - period]) {
        return false;
      }
    }
    return true;
  };
  while (!repeats()) {
    ++period;
  }
  return {
      windows.begin(),
      windows.begin() + static_cast<std::ptrdiff_t>(period)};
}

}  // namespace

void read_windows(
    const HfReader& reader,
    ModelConfig& config,
    const std::function<bool(std::int64_t layer)>& otherwise) {
  std::vector<bool> windows;
  if (reader.has("layer_types")) {
    const auto types = reader.need<std::vector<std::string>>("layer_types");
    FLATSHARD_CHECK(
        static_cast<std::int64_t>(types.size()) == config.layers,
        format,
        "{}: expected layer_types of num_hidden_layers = {}, got {}",
        reader.file(),
        config.layers,
        types.size());
    for (const std::string& type : types) {
      FLATSHARD_CHECK(
          type == kFull || type == kSliding,
          config,
          "{}: expected layer_types of '{}' and '{}', got '{}'; it is not "
          "supported",
          reader.file(),
          kFull,
          kSliding,
          type);
      windows.push_back(type == kSliding);
    }
  } else {
    for (std::int64_t layer = 0; layer < config.layers; ++layer) {
      windows.push_back(otherwise(layer));
    }
  }
  AttentionOptions& attention = config.block.attention;
  if (std::find(windows.begin(), windows.end(), true) == windows.end()) {
    attention.window = 0;
  }
  attention.window_pattern =
      attention.window > 0 ? pattern_of(windows) : std::vector<bool>();
}

void write_layer_types(
    const ModelConfig& config,
    nlohmann::ordered_json& json) {
  auto types = nlohmann::ordered_json::array();
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    types.push_back(
        config.block.attention.has_window(layer) ? kSliding : kFull);
  }
  json["layer_types"] = types;
}

void read_qwen_windows(const HfReader& reader, ModelConfig& config) {
  if (!reader.get<bool>("use_sliding_window", false)) {
    return;
  }
  config.block.attention.window =
      reader.get<std::int64_t>("sliding_window", 4096);
  const auto first = reader.get<std::int64_t>("max_window_layers", 28);
  read_windows(reader, config, [first](std::int64_t layer) {
    return layer >= first;
  });
}

void write_qwen_windows(
    const ModelConfig& config,
    nlohmann::ordered_json& json) {
  const std::int64_t window = config.block.attention.window;
  json["use_sliding_window"] = window > 0;
  if (window > 0) {
    json["sliding_window"] = window;
    write_layer_types(config, json);
  }
}

}  // namespace flatshard::models
