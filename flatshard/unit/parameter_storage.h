#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace flatshard {

/// The owner of a sharded parameter.
struct ParameterOwner {
  std::string unit;  ///< e.g. "unit layers.3"
  std::string parameter;
  bool retired = false;   ///< its Runtime is gone
  std::string stored_in;  ///< an encoding: it has planes and no values
};

/// The storage of one unsharded parameter: a separate StorageImpl that points
/// into a slot while the unit is unsharded and at nothing while it is
/// resharded. The tensor object stays, and views that autograd saved follow.
///
/// While it is resharded, or hidden, the tensor itself shows another storage.
/// That throws when its data are read or written and names the parameter:
/// kernels would follow the null pointer. Older views throw while it is
/// resharded, and are valid again after the next all-gather.
///
/// Each has its own storage, since autograd and AOTAutograd treat tensors that
/// share one as aliases of each other.
class ParameterStorage {
 public:
  ParameterStorage() = default;

  /// Gives `parameter` (also one on the meta device) a storage without
  /// memory on `device`, with `dtype`. requires_grad, strides and all
  /// handles stay. `parameter` is dense: it has no gaps. `unit` ("unit
  /// layers.3") and `name` are for the error on access while it has no
  /// data.
  ParameterStorage(
      at::Tensor parameter,
      const std::string& unit,
      const std::string& name,
      at::ScalarType dtype,
      at::Device device);

  /// Returns the owner of a parameter that is resharded or hidden; none for
  /// other tensors.
  static std::optional<ParameterOwner> owner_of(const at::Tensor& tensor);

  /// Notes that an array of another library shares the memory of `tensor`, if
  /// that is an unsharded parameter or a view of one. Tensor.numpy() needs no
  /// call.
  static void note_shared(const at::Tensor& tensor);
  /// Called before clear().
  /// @throws Error{usage} when an array may still read its memory.
  void check_not_shared() const;

  /// Sets the name for the error of a read while it has no data.
  void set_name(const std::string& unit, const std::string& name) const;
  /// Sets the full text of that error.
  void set_access_error(const std::string& text) const;

  /// Marks that it has planes in `encoding` and never data, as the error
  /// reports. From here on nothing below changes what it shows.
  void store_in(const std::string& encoding) const;
  /// It is not one of those.
  bool has_values() const;
  /// The parameter's data is at `data` from now on. Not owned.
  void point_at(void* data) const;
  /// The parameter has no data; its shape stays. With `set_released_memory` it
  /// points there instead of nowhere.
  void clear() const;
  /// From now on, access to the parameter raises an error, or no longer does.
  /// Its data stay where they are. Two pointers are exchanged; nothing else.
  /// An empty parameter has no data at any time, and is never pointed at them
  /// when its unit has nothing else to all-gather: it stays as it is.
  void hide() const { show(nbytes_ > 0 ? refusing_ : storage_); }
  void show() const {
    if (has_values()) {
      show(storage_);
    }
  }
  /// Clears it permanently, views as well: the Runtime frees the memory.
  void retire() const;
  /// The target of the cleared parameter's pointer, for debugging; see
  /// diagnostics/poison.h.
  /// Has the parameter's size, and exists as long as the parameter points
  /// there.
  void set_released_memory(std::shared_ptr<void> memory) {
    if (has_values()) {
      released_ = std::move(memory);
    }
  }
  std::size_t nbytes() const { return nbytes_; }

  /// False after other code replaced the parameter's storage (`p.data = x`,
  /// `set_`).
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
