#include "flatshard/moe/row_places.h"

#include "flatshard/core/error.h"
#include "flatshard/moe/cuda_moe.h"
#include "flatshard/nn/cuda_ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace flatshard::nn {
namespace {

constexpr std::int32_t kDropped = -1;

std::int32_t place_of_row(
    std::int32_t row,
    const std::int32_t* runs,
    std::int64_t num_runs) {
  const std::int32_t* const ends = runs + num_runs + 1;
  const std::int32_t* const above = std::upper_bound(runs, ends, row);
  if (above == runs || above == ends) {
    return row;  // before the first run, or after the last
  }
  const std::ptrdiff_t run = above - runs - 1;
  return -2 - (ends[run] + row - runs[run]);
}

// Copies rows as bytes, so for every dtype.
class Rows {
 public:
  Rows(const at::Tensor& leaving, const at::Tensor& staying)
      : leaving_(static_cast<char*>(leaving.data_ptr())),
        staying_(static_cast<char*>(staying.data_ptr())),
        nbytes_(leaving.size(1) * leaving.element_size()) {}
  char* at(std::int32_t place) const {
    return place >= 0 ? leaving_ + place * nbytes_
                      : staying_ + (-2 - place) * nbytes_;
  }
  std::int64_t nbytes() const { return nbytes_; }

 private:
  char* leaving_;
  char* staying_;
  std::int64_t nbytes_;
};

void check_rows(
    const char* what,
    const at::Tensor& leaving,
    const at::Tensor& staying) {
  FLATSHARD_CHECK(
      leaving.dim() == 2 && staying.dim() == 2 &&
          leaving.size(1) == staying.size(1) && leaving.is_contiguous() &&
          staying.is_contiguous() &&
          leaving.scalar_type() == staying.scalar_type(),
      usage,
      "{}: expected contiguous rows of one size and dtype, got {} {} and {} {}",
      what,
      c10::str(leaving.sizes()),
      c10::toString(leaving.scalar_type()),
      c10::str(staying.sizes()),
      c10::toString(staying.scalar_type()));
}

}  // namespace

bool can_split_rows(const at::Tensor& rows) {
  return rows.is_cpu() || cuda::supports(rows);
}

RowPlaces row_places(
    const Permutation& permutation,
    const at::Tensor& runs,
    std::int64_t num_rows) {
  RowPlaces places{
      .of_rows = at::empty_like(permutation.order),
      .of_pairs = at::empty_like(permutation.inverse)};
  if (permutation.order.is_cuda()) {
    cuda::row_places(
        permutation.order,
        runs,
        num_rows,
        places.of_rows,
        places.of_pairs);
    return places;
  }
  const auto* order = permutation.order.const_data_ptr<std::int32_t>();
  const auto* begins = runs.const_data_ptr<std::int32_t>();
  auto* of_rows = places.of_rows.mutable_data_ptr<std::int32_t>();
  auto* of_pairs = places.of_pairs.mutable_data_ptr<std::int32_t>();
  for (std::int32_t row = 0; row < permutation.rows(); ++row) {
    of_rows[row] =
        row < num_rows ? place_of_row(row, begins, runs.size(1) - 1) : kDropped;
    of_pairs[order[row]] = of_rows[row];
  }
  return places;
}

void permute_rows_into(
    const at::Tensor& x,
    const Permutation& permutation,
    const RowPlaces& places,
    std::int64_t num_rows,
    const at::Tensor& leaving,
    const at::Tensor& staying) {
  check_rows("permute_rows_into", leaving, staying);
  if (cuda::supports(x)) {
    cuda::permute_rows(
        x,
        permutation.order,
        places.of_rows,
        permutation.slots(),
        num_rows,
        leaving,
        staying);
    return;
  }
  const Rows to(leaving, staying);
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  const auto* order = permutation.order.const_data_ptr<std::int32_t>();
  const auto* place = places.of_rows.const_data_ptr<std::int32_t>();
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(
        to.at(place[row]),
        from + order[row] / permutation.slots() * to.nbytes(),
        to.nbytes());
  }
}

void sum_rows_from(
    const at::Tensor& leaving,
    const at::Tensor& staying,
    const RowPlaces& places,
    const at::Tensor& addend,
    const at::Tensor& out) {
  check_rows("sum_rows_from", leaving, staying);
  if (cuda::supports(leaving)) {
    const at::Tensor like_rows =
        addend.defined() ? addend.to(leaving.scalar_type()).contiguous()
                         : addend;
    cuda::sum_rows(leaving, staying, places.of_pairs, like_rows, out);
    return;
  }
  // Brought together by pair, so that pair p is row p.
  const std::int64_t tokens = places.of_pairs.size(0);
  const std::int64_t slots = places.of_pairs.size(1);
  const at::Tensor rows =
      at::empty({tokens * slots, leaving.size(1)}, leaving.options());
  Permutation by_pair;
  by_pair.order = at::arange(tokens * slots, places.of_pairs.options());
  by_pair.inverse = by_pair.order.view({tokens, slots}).clone();
  const Rows from(leaving, staying);
  auto* to = static_cast<char*>(rows.mutable_data_ptr());
  const auto* place = places.of_pairs.const_data_ptr<std::int32_t>();
  auto* row_of = by_pair.inverse.mutable_data_ptr<std::int32_t>();
  for (std::int64_t pair = 0; pair < tokens * slots; ++pair) {
    if (place[pair] == kDropped) {
      row_of[pair] = -1;
    } else {
      std::memcpy(
          to + pair * from.nbytes(),
          from.at(place[pair]),
          from.nbytes());
    }
  }
  const at::NoGradGuard no_grad;
  at::Tensor first;
  if (addend.defined()) {
    first = addend.reshape({tokens, leaving.size(1)});
  }
  out.view({tokens, leaving.size(1)})
      .copy_(sum_rows_of_tokens(rows, by_pair, first));
}

}  // namespace flatshard::nn
