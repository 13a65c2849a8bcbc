#include "flatshard/models/hf_names.h"

#include "flatshard/core/error.h"
#include "flatshard/models/families/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace flatshard::models {
namespace {

constexpr std::string_view kOurs = "lm_head.norm.weight";
constexpr std::string_view kTheirs = "model.norm.weight";

constexpr std::string_view kExperts = ".mlp.experts.";
constexpr std::string_view kGateUp = "gate_up_proj";
constexpr std::string_view kDown = "down_proj";
// Returns the name that the family's files have for a parameter of a block.
std::string block_name(const FamilyNames& names, std::string_view name) {
  std::string result(name);
  for (const auto& [ours, theirs] : names.renames) {
    const std::size_t at = result.find(ours);
    if (at != std::string::npos) {
      return result.replace(at, ours.size(), theirs);
    }
  }
  return result;
}

// Returns the rows of a matrix that several parameters are in files.
std::optional<StoredEntry> fused_entry(
    const ModelConfig& config,
    const FamilyNames& names,
    const std::string& name,
    const std::vector<std::int64_t>& shape) {
  for (const FusedTensor& tensor : names.fused) {
    std::optional<StoredEntry> found;
    std::int64_t rows = 0;
    for (const FusedPart& part : tensor.parts) {
      if (name.ends_with(part.ours)) {
        std::string theirs = name;
        theirs.replace(
            name.size() - part.ours.size(),
            part.ours.size(),
            tensor.theirs);
        found = StoredEntry{theirs, shape, rows};
      }
      rows += part.rows(config);
    }
    if (found) {
      found->num_rows = rows;
      return found;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string to_hf_name(std::string_view name) {
  return std::string(name == kOurs ? kTheirs : name);
}

std::vector<StoredEntry> hf_entries(
    const ModelConfig& config,
    const std::string& name,
    const std::vector<std::int64_t>& shape) {
  const FamilyNames& names = family_of(config).names;
  const std::size_t at = name.find(kExperts);
  if (at == std::string::npos || names.experts.together) {
    if (auto fused = fused_entry(config, names, name, shape)) {
      return {std::move(*fused)};
    }
    return {{block_name(names, to_hf_name(name)), shape}};
  }
  FLATSHARD_CHECK(
      shape.size() == 3,
      internal,
      "parameter {}: expected three dimensions, got {}",
      name,
      shape.size());
  const std::string_view kind =
      std::string_view(name).substr(at + kExperts.size());
  const std::string experts =
      block_name(names, name.substr(0, at + kExperts.size()));
  const auto entry =
      [&](std::int64_t e, std::string_view what, std::int64_t rows) {
        return StoredEntry{
            fmt::format("{}{}.{}.weight", experts, e, what),
            {rows, shape[2]}};
      };
  std::vector<StoredEntry> entries;
  for (std::int64_t e = 0; e < shape[0]; ++e) {
    if (kind == kGateUp) {
      entries.push_back(entry(e, names.experts.gate, shape[1] / 2));
      entries.push_back(entry(e, names.experts.up, shape[1] / 2));
    } else {
      FLATSHARD_CHECK(
          kind == kDown,
          internal,
          "expected {} or {} of experts, got {}",
          kGateUp,
          kDown,
          name);
      entries.push_back(entry(e, names.experts.down, shape[1]));
    }
  }
  return entries;
}

bool is_unneeded_hf_entry(std::string_view name, std::size_t num_dims) {
  const auto ends = [&](std::string_view text) { return name.ends_with(text); };
  constexpr std::string_view kEnds[] = {
      ".inv_freq",
      ".cos_cached",
      ".sin_cached",
      ".masked_bias",
      ".causal_mask",
      ".position_ids",
      ".num_batches_tracked",
      "._extra_state",
      ".k_scale",
      ".v_scale"};
  if (std::any_of(std::begin(kEnds), std::end(kEnds), ends) ||
      name.find(".rotary_emb.") != name.npos) {
    return true;
  }
  // [1, 1, L, L]; biases of layers have one dimension.
  if (num_dims == 4 && (ends("attn.bias") || ends("attention.bias"))) {
    return true;
  }
  return !name.starts_with(kHfBasePrefix) && !name.starts_with("lm_head.");
}

std::optional<std::int64_t> layer_of_hf_entry(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) {
    return std::nullopt;
  }
  name.remove_prefix(kLayers.size());
  std::int64_t layer = 0;
  const auto [end, error] =
      std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() ? std::optional(layer) : std::nullopt;
}

StoredEntriesOf hf_entries_of(const ModelConfig& config) {
  return [config](
             const std::string& name,
             const std::vector<std::int64_t>& shape) {
    return hf_entries(config, name, shape);
  };
}

}  // namespace flatshard::models
