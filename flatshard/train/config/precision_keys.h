#pragma once

#include <array>

#include "flatshard/float8/recipe.h"
#include "flatshard/group/precision.h"
#include "flatshard/schedule/events.h"
#include "flatshard/train/config/key.h"

namespace flatshard::config {

template <>
inline constexpr Word<at::ScalarType> kWords<at::ScalarType>[] = {
    {"float32", at::kFloat},
    {"bfloat16", at::kBFloat16}};

template <>
inline constexpr Word<GradScaling> kWords<GradScaling>[] = {
    {"mean", GradScaling::mean},
    {"pre_scaled_sum", GradScaling::pre_scaled}};

struct Precision : flatshard::Precision {
#define KEY KEY_MEMBER
#define INHERITED(...)
#include "flatshard/train/config/sections/precision.def"
};

using Float8Recipe = std::optional<float8::Recipe>;
inline Word<Float8Recipe> recipe_word(float8::Recipe recipe) {
  return {float8::to_string(recipe), recipe};
}
template <>
inline const std::array<Word<Float8Recipe>, 5> kWords<Float8Recipe>{
    {{"none", std::nullopt},
     recipe_word(float8::Recipe::tensorwise),
     recipe_word(float8::Recipe::rowwise),
     recipe_word(float8::Recipe::blockwise),
     recipe_word(float8::Recipe::mxfp8)}};

enum class ColumnPlane { automatic, derived, stored };
template <>
inline constexpr Word<ColumnPlane> kWords<ColumnPlane>[] = {
    {"auto", ColumnPlane::automatic},
    {"derived", ColumnPlane::derived},
    {"stored", ColumnPlane::stored}};

template <>
inline constexpr Word<GatherParts> kWords<GatherParts>[] = {
    {"unit", GatherParts::unit},
    {"recomputed", GatherParts::recomputed},
    {"module", GatherParts::module}};

struct Float8 {
#define KEY KEY_MEMBER
#include "flatshard/train/config/sections/float8.def"
};

/// [precision] and [float8].
KeyTable precision_keys();

}  // namespace flatshard::config
