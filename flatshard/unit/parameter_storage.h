#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace flatshard {

/// The storage of one gathered parameter: a StorageImpl of its own that points
/// into a slot while the unit is gathered and at nothing while it rests. The
/// tensor object stays, and views that autograd saved follow.
///
/// While it rests the tensor itself shows another storage, which throws when
/// its data are read or written: kernels would follow the null pointer. Views
/// that are older than that do follow it; unit/poison.h is for them.
///
/// A storage of its own, since autograd and AOTAutograd take tensors that share
/// one for aliases of each other.
class ParameterStorage {
 public:
  ParameterStorage() = default;

  /// Gives `parameter` (also one on the meta device) a storage without memory
  /// on `device`, with `dtype`. requires_grad and all handles stay. `name` is
  /// for the error of who reads it while it has no data.
  ParameterStorage(
      at::Tensor parameter,
      const std::string& name,
      at::ScalarType dtype,
      at::Device device);

  /// For the error of who reads it while it has no data.
  void set_name(const std::string& name) const;

  /// The parameter's data is at `data` from now on. Not owned.
  void point_at(void* data) const;
  /// The parameter has no data; its shape stays. With `set_released_memory` it
  /// points there instead of nowhere.
  void clear() const;
  /// Where the cleared parameter points, for debugging; see unit/poison.h. Has
  /// the parameter's size, and lives as long as the parameter points there.
  void set_released_memory(std::shared_ptr<void> memory) {
    released_ = std::move(memory);
  }
  std::size_t nbytes() const { return nbytes_; }

  /// False once somebody gave the parameter another storage
  /// (`p.data = x`, `set_`).
  bool is_intact() const;
  const at::Tensor& parameter() const { return parameter_; }

 private:
  void show(const at::Storage& storage) const;

  at::Tensor parameter_;
  at::Storage storage_;
  at::Storage refusing_;  ///< what the tensor shows while it has no data
  std::size_t nbytes_ = 0;
  std::shared_ptr<void> released_;  ///< null: nothing
};

}  // namespace flatshard
