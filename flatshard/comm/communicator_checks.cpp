#include "flatshard/comm/communicator.h"
#include "flatshard/comm/tensor_memory.h"
#include "flatshard/core/error.h"

namespace flatshard {

void Communicator::check_tensor(
    CollectiveKind kind,
    const char* role,
    const at::Tensor& t) const {
  const auto where = [&] {
    return fmt::format("{} on '{}', {}", to_string(kind), name_, role);
  };
  FLATSHARD_CHECK(
      t.defined(),
      usage,
      "{}: expected a tensor, got an undefined one",
      where());
  FLATSHARD_CHECK(
      t.device() == device_,
      usage,
      "{}: expected device {}, got {}",
      where(),
      device_.str(),
      t.device().str());
  FLATSHARD_CHECK(
      t.is_contiguous(),
      usage,
      "{}: expected a contiguous tensor, got one with other strides",
      where());
}

void Communicator::check_pairs(
    CollectiveKind kind,
    std::span<const at::Tensor> large,
    std::span<const at::Tensor> small) const {
  const bool gather = kind == CollectiveKind::all_gather;
  const char* const large_role = gather ? "out" : "in";
  const char* const small_role = gather ? "in" : "out";
  FLATSHARD_CHECK(
      large.size() == small.size(),
      usage,
      "{} on '{}': expected as many inputs as outputs, got {} {} and {} {}",
      to_string(kind),
      name_,
      large.size(),
      large_role,
      small.size(),
      small_role);
  for (std::size_t i = 0; i < large.size(); ++i) {
    const at::Tensor& l = large[i];
    const at::Tensor& s = small[i];
    check_tensor(kind, large_role, l);
    check_tensor(kind, small_role, s);
    FLATSHARD_CHECK(
        l.scalar_type() == s.scalar_type(),
        usage,
        "{} on '{}': expected one dtype, got {} ({}) and {} ({})",
        to_string(kind),
        name_,
        c10::toString(l.scalar_type()),
        large_role,
        c10::toString(s.scalar_type()),
        small_role);
    FLATSHARD_CHECK(
        l.numel() == s.numel() * size_,
        usage,
        "{} on '{}' with {} ranks: expected {} = {} * {} elements in {}, got "
        "{}",
        to_string(kind),
        name_,
        size_,
        s.numel() * size_,
        size_,
        s.numel(),
        large_role,
        l.numel());
    if (!overlap(l, s)) {
      continue;
    }
    const auto own = begin_of(l) + rank_ * s.nbytes();
    FLATSHARD_CHECK(
        gather ? begin_of(s) == own : size_ == 1 && begin_of(s) == own,
        usage,
        "{} on '{}': {}",
        to_string(kind),
        name_,
        gather ? "in may alias out only at this rank's own slice"
               : "out must not overlap in");
  }
}

Communicator::Parts Communicator::check_parts(
    const char* role,
    const at::Tensor& tensor,
    std::span<const RowsOfPeer> parts) const {
  const std::int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  Parts some;
  for (const RowsOfPeer& part : parts) {
    FLATSHARD_CHECK(
        part.peer >= 0 && part.peer < size_ && part.begin >= 0 &&
            part.rows >= 0 && part.begin + part.rows <= rows,
        usage,
        "all_to_all on '{}', {}: expected rows below {} and ranks below {}, "
        "got rows {} to {} of rank {}",
        name_,
        role,
        rows,
        size_,
        part.begin,
        part.begin + part.rows,
        part.peer);
    if (part.rows > 0) {
      some.push_back(part);
    }
  }
  return some;
}

}  // namespace flatshard
