#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace flatshard {

/// The storage of one gathered parameter: a StorageImpl of its own that points
/// into a slot while the unit is gathered and at nothing while it rests. The
/// tensor object stays, and views that autograd saved follow.
///
/// A storage of its own, since autograd and AOTAutograd take tensors that share
/// one for aliases of each other.
class ParameterStorage {
 public:
  ParameterStorage() = default;

  /// Gives `parameter` (also one on the meta device) a storage without memory
  /// on `device`, with `dtype`. requires_grad and all handles stay.
  ParameterStorage(
      at::Tensor parameter,
      at::ScalarType dtype,
      at::Device device);

  /// The parameter's data is at `data` from now on. Not owned.
  void point_at(void* data) const;
  /// The parameter has no data; its shape stays.
  void clear() const;

  /// False once somebody gave the parameter another storage
  /// (`p.data = x`, `set_`).
  bool is_intact() const;
  const at::Tensor& parameter() const { return parameter_; }

 private:
  at::Tensor parameter_;
  at::Storage storage_;
  std::size_t nbytes_ = 0;
};

}  // namespace flatshard
