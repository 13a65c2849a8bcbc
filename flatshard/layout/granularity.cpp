#include "flatshard/layout/granularity.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "flatshard/core/error.h"
#include "flatshard/layout/checked.h"

namespace flatshard {

std::int64_t row_width(std::span<const std::int64_t> shape) {
  return shape.size() < 2 ? 1 : std::max<std::int64_t>(shape.back(), 1);
}

Granularity Granularity::element(std::int64_t n) {
  FLATSHARD_CHECK(
      n >= 1,
      usage,
      "Granularity::element expects n >= 1, got {}",
      n);
  return {Kind::element, n};
}

Granularity Granularity::row() {
  return {Kind::row, 1};
}

Granularity Granularity::dim0() {
  return {Kind::dim0, 1};
}

Granularity Granularity::block(std::int64_t rows) {
  FLATSHARD_CHECK(
      rows >= 1,
      usage,
      "Granularity::block expects rows >= 1, got {}",
      rows);
  return {Kind::block, rows};
}

Granularity Granularity::chunk() {
  return {Kind::chunk, 1};
}

Granularity Granularity::tensor() {
  return {Kind::tensor, 0};
}

Granularity Granularity::parse(std::string_view name, std::string_view option) {
  constexpr std::string_view kBlock = "block:";
  if (name.starts_with(kBlock)) {
    std::int64_t rows = 0;
    const char* const end = name.data() + name.size();
    const auto [stop, error] =
        std::from_chars(name.data() + kBlock.size(), end, rows);
    if (error == std::errc() && stop == end && rows >= 1) {
      return block(rows);
    }
  }
  for (const auto& [known, granularity] :
       {std::pair{"element", element()},
        std::pair{"row", row()},
        std::pair{"dim0", dim0()},
        std::pair{"chunk", chunk()},
        std::pair{"tensor", tensor()}}) {
    if (name == known) {
      return granularity;
    }
  }
  FLATSHARD_THROW(
      config,
      "{} expected element, row, dim0, block:N with N >= 1 rows, chunk, or "
      "tensor, got \"{}\"",
      option,
      name.substr(0, 80));
}

std::int64_t Granularity::granule_numel(
    std::span<const std::int64_t> shape) const {
  switch (kind_) {
    case Kind::element:
      return size_;
    case Kind::row:
    case Kind::block:
      return detail::checked_mul(size_, row_width(shape), to_string());
    case Kind::dim0:
    case Kind::chunk:
      return std::max<std::int64_t>(
          1,
          detail::numel_of(shape.subspan(shape.empty() ? 0 : 1), to_string()));
    case Kind::tensor:
      return detail::numel_of(shape, to_string());
  }
  FLATSHARD_THROW(internal, "granularity of unknown kind");
}

std::string Granularity::to_string() const {
  switch (kind_) {
    case Kind::element:
      return fmt::format("element({})", size_);
    case Kind::row:
      return "row";
    case Kind::dim0:
      return "dim0";
    case Kind::block:
      return fmt::format("block({})", size_);
    case Kind::chunk:
      return "chunk";
    case Kind::tensor:
      return "tensor";
  }
  return "unknown";
}

}  // namespace flatshard
