#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <optional>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

namespace flatshard::nn {

using TensorList = std::vector<at::Tensor>;

/// Specialize to true for a class that `for_each_tensor` may skip. Only types
/// that are not trivially copyable need it: no other type can contain a tensor.
template <class T>
inline constexpr bool holds_no_tensors = std::is_trivially_copyable_v<T>;
template <>
inline constexpr bool holds_no_tensors<at::Generator> = true;
template <>
inline constexpr bool holds_no_tensors<std::string> = true;

namespace visit_detail {

// Ends ordinary lookup, so that the call below finds user overloads only by
// argument-dependent lookup.
void for_each_tensor() = delete;

template <class T, class F>
concept HasUserVisitor = requires(const T& value, F& fn) {
  for_each_tensor(value, fn);
};

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

template <class T>
inline constexpr bool is_variant = false;
template <class... T>
inline constexpr bool is_variant<std::variant<T...>> = true;

struct ForEachTensor {
  template <class T, std::invocable<const at::Tensor&> F>
  void operator()(const T& value, F&& fn) const {
    using Fn = std::remove_reference_t<F>;
    if constexpr (std::derived_from<T, at::TensorBase>) {
      if (value.defined()) {
        fn(value);
      }
    } else if constexpr (HasUserVisitor<T, Fn>) {
      for_each_tensor(value, fn);
    } else if constexpr (holds_no_tensors<T> && !std::ranges::range<T>) {
      // Numbers, enums, flags: nothing to see.
    } else if constexpr (holds_no_tensors<T> && std::same_as<T, std::string>) {
      // Text.
    } else if constexpr (is_optional<T>) {
      if (value.has_value()) {
        (*this)(*value, fn);
      }
    } else if constexpr (is_variant<T>) {
      std::visit([&](const auto& held) { (*this)(held, fn); }, value);
    } else if constexpr (std::ranges::input_range<const T>) {
      using Element = std::remove_cvref_t<std::ranges::range_value_t<const T>>;
      if constexpr (!std::is_arithmetic_v<Element>) {
        for (const auto& element : value) {
          (*this)(element, fn);
        }
      }
    } else if constexpr (TupleLike<T>) {
      std::apply(
          [&](const auto&... elements) { ((*this)(elements, fn), ...); },
          value);
    } else {
      static_assert(
          holds_no_tensors<T>,
          "give this type `void for_each_tensor(const T&, F&&)` in its own "
          "namespace, or specialize flatshard::nn::holds_no_tensors");
    }
  }
};

}  // namespace visit_detail

inline namespace customization {

/// for_each_tensor(value, fn): calls `fn(const at::Tensor&)` for each defined
/// tensor in `value`, in order. It handles tensors, optionals, variants, pairs,
/// tuples and every range (vector, array, map, span), nested at will. To
/// support a custom class, define a function of the same name in its namespace:
///
///     template <class F>
///     void for_each_tensor(const Batch& b, F&& fn) {
///       flatshard::nn::for_each_tensor(b.tokens, fn);
///     }
///
/// A class that could contain tensors and has no such function cannot compile.
inline constexpr visit_detail::ForEachTensor for_each_tensor{};

}  // namespace customization

/// Returns every defined tensor of `values`, in order.
template <class... T>
TensorList collect_tensors(const T&... values) {
  TensorList found;
  const auto add = [&](const at::Tensor& tensor) { found.push_back(tensor); };
  (for_each_tensor(values, add), ...);
  return found;
}

}  // namespace flatshard::nn
