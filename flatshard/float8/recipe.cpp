#include "flatshard/float8/recipe.h"

#include <array>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/core/nearest_name.h"

namespace flatshard::float8 {
namespace {

constexpr std::array kRecipes{
    std::pair{Recipe::tensorwise, std::string_view("tensorwise")},
    std::pair{Recipe::rowwise, std::string_view("rowwise")},
    std::pair{Recipe::blockwise, std::string_view("blockwise")},
    std::pair{Recipe::blockwise_1x128, std::string_view("blockwise_1x128")},
    std::pair{Recipe::mxfp8, std::string_view("mxfp8")}};
constexpr std::array kFormats{
    std::pair{Format::e4m3, std::string_view("e4m3")},
    std::pair{Format::e5m2, std::string_view("e5m2")}};
constexpr std::array kRoundings{
    std::pair{Rounding::floor, std::string_view("floor")},
    std::pair{Rounding::up, std::string_view("up")}};

template <class Names, class T>
std::string_view name_of(const Names& names, T value) {
  for (const auto& [candidate, name] : names) {
    if (candidate == value) {
      return name;
    }
  }
  return "unknown";
}

template <class Names>
auto value_of(const char* what, const Names& names, std::string_view name) {
  std::vector<std::string> all;
  std::string list;
  for (const auto& [value, candidate] : names) {
    if (candidate == name) {
      return value;
    }
    all.emplace_back(candidate);
    list += (list.empty() ? "" : ", ") + all.back();
  }
  const std::string near = near_name(name, all);
  FLATSHARD_THROW(
      config,
      "{}: expected one of {}, got '{}'{}",
      what,
      list,
      name,
      near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

}  // namespace

std::string_view to_string(Recipe recipe) {
  return name_of(kRecipes, recipe);
}
std::string_view to_string(Format format) {
  return name_of(kFormats, format);
}
std::string_view to_string(Rounding rounding) {
  return name_of(kRoundings, rounding);
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
