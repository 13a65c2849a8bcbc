#pragma once

#include "flatshard/moe/router_args.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

template <>
inline constexpr Word<std::optional<nn::RouterScore>>
    kWords<std::optional<nn::RouterScore>>[] = {
        {"auto", std::nullopt},
        {"softmax", nn::RouterScore::softmax},
        {"sigmoid", nn::RouterScore::sigmoid}};

/// The replacement of the rotation's scaling of a preset or a config.json.
enum class RopeScalingChoice {
  from_shape,
  none,
  llama3,
  linear,
  dynamic,
  yarn
};

template <>
inline constexpr Word<RopeScalingChoice> kWords<RopeScalingChoice>[] = {
    {"auto", RopeScalingChoice::from_shape},
    {"none", RopeScalingChoice::none},
    {"llama3", RopeScalingChoice::llama3},
    {"linear", RopeScalingChoice::linear},
    {"dynamic", RopeScalingChoice::dynamic},
    {"yarn", RopeScalingChoice::yarn}};

struct Model {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/model.def"
};

struct Moe {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/moe.def"
};

/// [model] and [moe].
KeyTable model_keys();

}  // namespace flatshard::config
