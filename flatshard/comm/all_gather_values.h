#pragma once

#include <ATen/Functions.h>

#include <cstring>
#include <type_traits>
#include <vector>

#include "flatshard/comm/communicator.h"

namespace flatshard {

/// Returns every rank's `value`, by rank of the group: for the few values that
/// ranks exchange once. Collective; blocks the host.
/// @tparam T  plain data that means the same in another process.
template <class T>
std::vector<T> all_gather_values(Communicator& group, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  const at::Tensor mine =
      at::empty({static_cast<std::int64_t>(sizeof(T))}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &value, sizeof(T));
  const at::Tensor in = mine.to(group.device());
  const at::Tensor out = at::empty({group.size() * in.numel()}, in.options());
  group.all_gather(out, in);
  const at::Tensor all = out.cpu();
  std::vector<T> values(static_cast<std::size_t>(group.size()));
  std::memcpy(values.data(), all.const_data_ptr(), all.nbytes());
  return values;
}

}  // namespace flatshard
