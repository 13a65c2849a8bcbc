#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flatshard/core/error.h"

namespace flatshard::detail {

/// A JSON value to be parsed: errors of every access contain the expected type
/// and the path of the value.
class JsonField {
 public:
  JsonField(const nlohmann::json& value, std::string where)
      : value_(value), where_(std::move(where)) {}

  const std::string& where() const { return where_; }

  JsonField at(std::string_view key) const {
    check(value_.is_object(), "an object");
    const auto found = value_.find(std::string(key));
    FLATSHARD_CHECK(
        found != value_.end(),
        format,
        "{}: the key '{}' is missing",
        where_,
        key);
    return {*found, fmt::format("{}: {}", where_, key)};
  }

  std::string text() const {
    check(value_.is_string(), "a text");
    return value_.get<std::string>();
  }

  /// >= 0, and small enough for any arithmetic on offsets.
  std::int64_t count() const {
    check(
        value_.is_number_unsigned() &&
            value_.get<std::uint64_t>() <= std::uint64_t{1} << 62,
        "an integer from 0 to 2^62");
    return value_.get<std::int64_t>();
  }

  template <class F>
  void each(F&& visit) const {
    check(value_.is_array(), "a list");
    for (std::size_t i = 0; i < value_.size(); ++i) {
      visit(JsonField(value_[i], fmt::format("{}[{}]", where_, i)));
    }
  }

  template <class F>
  void each_key(F&& visit) const {
    check(value_.is_object(), "an object");
    for (const auto& [key, item] : value_.items()) {
      visit(key, JsonField(item, fmt::format("{}: {}", where_, key)));
    }
  }

  /// A pair `[begin, end]`.
  std::pair<std::int64_t, std::int64_t> range() const {
    std::vector<std::int64_t> numbers;
    each([&](const JsonField& item) { numbers.push_back(item.count()); });
    check(
        numbers.size() == 2 && numbers[0] <= numbers[1],
        "[begin, end] with begin <= end");
    return {numbers[0], numbers[1]};
  }

  void check(bool ok, std::string_view expected) const {
    if (ok) {
      return;
    }
    std::string found =
        value_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    constexpr std::size_t kLongest = 80;
    if (found.size() > kLongest) {
      found = found.substr(0, kLongest) + "...";
    }
    FLATSHARD_THROW(format, "{}: expected {}, got {}", where_, expected, found);
  }

 private:
  const nlohmann::json& value_;
  std::string where_;
};

}  // namespace flatshard::detail
