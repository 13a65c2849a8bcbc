#include "flatshard/checkpoint/state_conversion.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "flatshard/checkpoint/dtypes.h"
#include "flatshard/core/error.h"
#include "flatshard/core/rounding.h"
#include "flatshard/optim/state_format.h"

namespace flatshard {
namespace {

constexpr std::uint64_t kAlign = 16;

void want_boxes(
    const StoredTensor& tensor,
    const std::vector<Rectangle>& boxes,
    std::int64_t item_nbytes,
    std::vector<WantedBox>& wanted,
    std::uint64_t& nbytes) {
  for (const Rectangle& box : boxes) {
    wanted.push_back({&tensor, box, nbytes});
    nbytes += static_cast<std::uint64_t>(box.numel() * item_nbytes);
  }
}

at::Tensor floats_at(const std::byte* data, std::int64_t n, at::ScalarType as) {
  return at::from_blob(const_cast<std::byte*>(data), {n}, at::TensorOptions(as))
      .to(at::kFloat);
}

at::Tensor codes_at(
    const std::byte* codes,
    const std::byte* scales,
    bool is_signed,
    std::int64_t n) {
  const at::Tensor bytes = at::from_blob(
      const_cast<std::byte*>(codes),
      {n},
      at::TensorOptions(is_signed ? at::kChar : at::kByte));
  return decode_states(
      bytes,
      floats_at(scales, ceil_div(n, kStateBlock), at::kFloat));
}

bool is_one_of(std::string_view dtype, std::initializer_list<const char*> of) {
  return std::ranges::find(of, dtype) != of.end();
}

}  // namespace

StateConversion::StateConversion(
    NamedShard values,
    std::optional<NamedShard> scales,
    const StoredTensor& stored,
    const StoredTensor* stored_scales,
    const std::string& what)
    : values_(std::move(values)),
      scales_(std::move(scales)),
      stored_(&stored),
      stored_scales_(
          is_one_of(stored.dtype, {"I8", "U8"}) ? stored_scales : nullptr) {
  const bool has_codes = is_one_of(stored.dtype, {"I8", "U8"});
  FLATSHARD_CHECK(
      has_codes || is_one_of(stored.dtype, {"F32", "BF16"}),
      format,
      "{}: expected dtype F32, BF16, I8 or U8, got {}",
      what,
      stored.dtype);
  FLATSHARD_CHECK(
      stored.shape == values_.whole_shape(),
      format,
      "{}: expected shape [{}], got [{}]",
      what,
      fmt::join(values_.whole_shape(), ", "),
      fmt::join(stored.shape, ", "));
  if (has_codes) {
    FLATSHARD_CHECK(
        stored_scales_ != nullptr && stored_scales_->dtype == "F32" &&
            stored_scales_->shape == state_scales_shape(stored.shape),
        format,
        "{}: expected F32 scales of shape [{}] under the same name in the role "
        "that ends in {}",
        what,
        fmt::join(state_scales_shape(stored.shape), ", "),
        kScaleSuffix);
  }
  first_ = values_.begin;
  end_ = first_ + values_.tensor.numel();
  if (from_codes() && first_ < end_) {
    read_scales_ = state_scales(values_.shape, values_.slice);
    FLATSHARD_CHECK(
        read_scales_.has_value(),
        format,
        "{}: this rank's slice splits blocks of {} codes; load with another "
        "parallelism.tensor_parallel_degree",
        what,
        kStateBlock);
    // Blocks from their start on.
    first_ = first_ / kStateBlock * kStateBlock;
    end_ = std::min(
        round_up(end_, kStateBlock),
        c10::multiply_integers(values_.shape));
  }
}

void StateConversion::want(
    std::vector<WantedBox>& wanted,
    std::uint64_t& nbytes) {
  if (first_ == end_) {
    return;
  }
  nbytes = round_up(nbytes, kAlign);
  begin_ = nbytes;
  const std::int64_t item = from_codes()              ? 1
                            : stored_->dtype == "F32" ? sizeof(float)
                                                      : 2;
  want_boxes(
      *stored_,
      values_.slice.boxes(values_.shape, first_, end_),
      item,
      wanted,
      nbytes);
  if (!from_codes()) {
    return;
  }
  nbytes = round_up(nbytes, kAlign);
  scales_begin_ = nbytes;
  want_boxes(
      *stored_scales_,
      read_scales_->slice.boxes(
          read_scales_->shape,
          first_ / kStateBlock,
          ceil_div(end_, kStateBlock)),
      sizeof(float),
      wanted,
      nbytes);
}

void StateConversion::apply(std::span<const std::byte> staging) const {
  if (first_ == end_) {
    return;
  }
  const std::byte* data = staging.data() + begin_;
  const std::int64_t n = end_ - first_;
  const at::Tensor read =
      from_codes() ? codes_at(
                         data,
                         staging.data() + scales_begin_,
                         stored_->dtype == "I8",
                         n)
                   : floats_at(
                         data,
                         n,
                         stored_->dtype == "F32" ? at::kFloat : at::kBFloat16);
  const at::Tensor values =
      read.narrow(0, values_.begin - first_, values_.tensor.numel());
  if (scales_) {
    encode_states(values, values_.tensor, scales_->tensor);
  } else {
    values_.tensor.copy_(values);
  }
}

}  // namespace flatshard
