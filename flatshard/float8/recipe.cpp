#include "flatshard/float8/recipe.h"

#include "flatshard/core/words.h"

namespace flatshard::float8 {
namespace {

constexpr Word<Recipe> kRecipes[] = {
    {"tensorwise", Recipe::tensorwise},
    {"rowwise", Recipe::rowwise},
    {"blockwise", Recipe::blockwise},
    {"blockwise_1x128", Recipe::blockwise_1x128},
    {"mxfp8", Recipe::mxfp8}};
constexpr Word<Format> kFormats[] = {
    {"e4m3", Format::e4m3},
    {"e5m2", Format::e5m2}};
constexpr Word<Rounding> kRoundings[] = {
    {"floor", Rounding::floor},
    {"up", Rounding::up}};

}  // namespace

std::string_view to_string(Recipe recipe) {
  return word_of(kRecipes, recipe);
}
std::string_view to_string(Format format) {
  return word_of(kFormats, format);
}
std::string_view to_string(Rounding rounding) {
  return word_of(kRoundings, rounding);
}

Recipe recipe_of(std::string_view name) {
  return value_of("recipe", kRecipes, name);
}
Format format_of(std::string_view name) {
  return value_of("format", kFormats, name);
}
Rounding rounding_of(std::string_view name) {
  return value_of("rounding", kRoundings, name);
}

}  // namespace flatshard::float8
